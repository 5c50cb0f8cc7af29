"""Finds the largest storage that each operator writes: its type is that in which the operator computes."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import NONE, Ints, Ops, Storages, Uses


def largest_written(ops: Ops, storages: Storages, uses: Uses) -> Ints:
    """Returns the row of the largest storage that each operator makes or changes, NONE for none, shape ``(ops,)``.

    Args:
        ops: The operators, whose ids are rows.
        storages: The storages, whose ids are rows.
        uses: What the operators use.
    """
    written = np.flatnonzero(uses.role != "read")
    order = written[np.argsort(storages.requested_bytes[uses.storage_id[written]], kind="stable")]
    largest: Ints = np.full(len(ops), NONE, dtype=np.int64)
    largest[uses.op_id[order]] = uses.storage_id[order]  # the last one written is the largest
    return largest
