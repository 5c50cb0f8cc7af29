"""Names what autograd graphs hold: the storages that the operators of their nodes have made."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.memory.holders import holder_records
from memprof.trace.assemble.recording import Recording
from memprof.trace.schema import NONE, Holders, Ops, Storages


def with_graphs(recording: Recording, holders: Holders, ops: Ops, storages: Storages) -> Holders:
    """Replaces the statements on graphs by a row for each storage that lives on and was made by one of their nodes.

    Of several graphs with the same node, the first counts.

    Args:
        recording: The recording.
        holders: Its table of holders, one row per statement.
        ops: Its operators.
        storages: Its storages.
    """
    graphs = [(row, one["nodes"]) for row, one in enumerate(holder_records(recording.spool)) if "nodes" in one]
    if not graphs:
        return holders
    # The operator of node k is the first that ran while the counter stood at k + 1.
    numbers, first = np.unique(recording.raw["sequence"], return_index=True)
    living = np.flatnonzero((storages.freed_op_id == NONE) & (storages.created_op_id != NONE))
    made_by: dict[int, list[int]] = {}
    for storage in living.tolist():
        made_by.setdefault(int(storages.created_op_id[storage]), []).append(storage)
    rows: dict[int, int] = {}
    for row, nodes in graphs:
        at = np.searchsorted(numbers, np.array(nodes, dtype=np.int64) + 1)
        is_here = (at < len(numbers)) & (numbers[np.minimum(at, len(numbers) - 1)] == np.array(nodes) + 1)
        for op in recording.rows_of(first[at[is_here]]).tolist():
            for storage in made_by.get(op, ()):
                rows.setdefault(storage, row)
    held = list(rows)
    by_graph = holders.take(np.array(list(rows.values()), dtype=np.int64)).replace(
        storage_id=storages.storage_id[held],
        shape=storages.shape[held],
        dtype=storages.dtype[held],
        total_bytes=storages.allocated_bytes[held],
        has_graph=np.full(len(held), fill_value=False),
        is_by_graph=np.full(len(held), fill_value=True),
    )
    is_plain = np.full(len(holders), fill_value=True)
    is_plain[[row for row, _ in graphs]] = False
    return Holders.joined([holders.take(is_plain), by_graph])
