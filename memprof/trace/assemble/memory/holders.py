"""The table of what holds tensors, from the recorder's statements, with the names of autograd graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from memprof.trace.assemble.recording import Recording
from memprof.trace.assemble.texts import as_texts, listed
from memprof.trace.files.spool import Spool
from memprof.trace.schema import HOLDER_KINDS, NONE, Holders, HostNeeds, Ints, Ops, Stacks, Storages

_OF_NEEDS = ("loader", "count", "batches", "requested_bytes", "size_bytes")


def holder_records(spool: Spool) -> list[dict[str, Any]]:
    """Returns the statements, in order."""
    return [record for records in spool.records.get("holders", []) for record in records]


def holder_table(spool: Spool, storage_id: Ints | None, stacks: Stacks) -> tuple[Holders, Stacks]:
    """Builds the table.

    Args:
        spool: The raw recording.
        storage_id: Storage of each statement, NONE where not recorded; None if no statement has one.
        stacks: The stacks.

    Returns:
        The table, and the stacks with a row for each variable's place and each stack of the statements.
    """
    records = holder_records(spool)
    names = listed(spool, "names")
    rows, stacks = _with_stacks(stacks, [one for each in records for one in (each["frame"], each.get("made_at", ""))])
    table = Holders.of(
        step=[record["step"] for record in records],
        device=as_texts([record["device"] for record in records]),
        storage_id=np.full(len(records), NONE) if storage_id is None else storage_id,
        kind=as_texts([record["kind"] if record["kind"] in HOLDER_KINDS else "unknown" for record in records]),
        chain=as_texts([record["chain"] for record in records]),
        container=as_texts([record["container"] for record in records]),
        stack_id=[rows.get(record["frame"], NONE) for record in records],
        shape=as_texts([record["shape"] for record in records]),
        dtype=as_texts([record["dtype"] for record in records]),
        has_graph=[record["has_graph"] for record in records],
        tensors=[record["tensors"] for record in records],
        total_bytes=[record["bytes"] for record in records],
        made_step=[record.get("made_step", NONE) for record in records],
        op=as_texts([names[record["op"]] if "op" in record else "" for record in records]),
        module_id=[record.get("module", NONE) for record in records],
        is_by_graph=[record.get("is_by_graph", False) for record in records],
        made_stack_id=[rows.get(record.get("made_at", ""), NONE) for record in records],
    )
    return table, stacks


def need_table(spool: Spool, stacks: Stacks) -> tuple[HostNeeds, Stacks]:
    """Builds the table of what lines of the job take of host memory; returns the stacks with theirs, too."""
    records: list[dict[str, Any]] = next(reversed(spool.records.get("needs", [])), [])  # all until its window
    texts = ["\n".join(record["frames"]) for record in records]
    rows, stacks = _with_stacks(stacks, texts)
    table = HostNeeds.of(
        kind=as_texts([record["kind"] for record in records]),
        stack_id=[rows.get(text, NONE) for text in texts],
        **{name: [record[name] for record in records] for name in _OF_NEEDS},
    )
    return table, stacks


def _with_stacks(stacks: Stacks, texts: Iterable[str]) -> tuple[dict[str, int], Stacks]:
    """Returns the stacks with more, and the row of each of these by its frames."""
    frames = [str(text) for text in stacks.frames]
    rows: dict[str, int] = {}
    for stack in texts:
        if stack and stack not in rows:
            rows[stack] = len(frames)
            frames.append(stack)
    nodes = [*stacks.fx_nodes.tolist(), *[""] * len(rows)]
    return rows, Stacks.of(stack_id=np.arange(len(frames)), frames=as_texts(frames), fx_nodes=as_texts(nodes))


def with_graphs(recording: Recording, holders: Holders, ops: Ops, storages: Storages) -> Holders:
    """Replaces the statements on graphs by a row for each storage that lives on and was made by one of their nodes.

    Of several graphs with the same node, the first counts.
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
