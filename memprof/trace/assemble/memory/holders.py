"""The table of what holds tensors, from the recorder's statements."""

from __future__ import annotations

from typing import Any

import numpy as np

from memprof.trace.assemble.texts import as_texts, listed
from memprof.trace.files.spool import Spool
from memprof.trace.schema import HOLDER_KINDS, NONE, Holders, Ints, Stacks


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
    frames = [str(text) for text in stacks.frames]
    rows: dict[str, int] = {}
    for record in records:
        for stack in (record["frame"], record.get("made_at", "")):
            if stack and stack not in rows:
                rows[stack] = len(frames)
                frames.append(stack)
    nodes = [*stacks.fx_nodes.tolist(), *[""] * len(rows)]
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
    return table, Stacks.of(stack_id=np.arange(len(frames)), frames=as_texts(frames), fx_nodes=as_texts(nodes))
