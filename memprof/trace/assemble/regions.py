"""Compiled regions, whose many forward operators have one backward node between them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memprof.trace.assemble.links import OUTSIDE
from memprof.trace.files.spool import FLAG_IN_REGION
from memprof.trace.schema import NONE, Ints, Ops, Saved, Storages, Uses


def region_ends(raw: Mapping[str, Ints]) -> Ints:
    """Returns the last operator of the region that ran each operator in forward, when the region saves for backward.

    Args:
        raw: The stream of operators.

    Returns:
        Row numbers; NONE outside regions. Shape (ops,).
    """
    ends = np.full(len(raw["flags"]), NONE, dtype=np.int64)
    inside = np.flatnonzero(((raw["flags"] & FLAG_IN_REGION) != 0) & (raw["node_sequence"] == OUTSIDE))
    # Autograd's counter stands still inside a region.
    numbers, place = np.unique(raw["sequence"][inside], return_inverse=True)
    last = np.full(len(numbers), NONE, dtype=np.int64)
    np.maximum.at(last, place, inside)
    ends[inside] = last[place]
    return ends


def saved_in_regions(saved: Saved, uses: Uses, storages: Storages, ops: Ops, ends: Ints) -> Saved:
    """Returns what was saved for backward, in regions with the module that computed or first read it.

    Args:
        saved: With the module of the region's last operator.
        uses: Which operator uses which storage.
        storages: The storages.
        ops: The operators.
        ends: Last operator of the region that ran each operator in forward, NONE outside. Shape (ops,).
    """
    if not (ends != NONE).any() or not len(saved):
        return saved
    count = len(storages)
    by_region = ends[uses.op_id] != NONE
    keys = ends[uses.op_id[by_region]] * count + uses.storage_id[by_region]
    order = np.lexsort((uses.op_id[by_region], keys))
    known, first = np.unique(keys[order], return_index=True)
    readers = uses.op_id[by_region][order][first]
    created = storages.created_op_id[saved.storage_id]
    is_own = (created != NONE) & (ends[created] == saved.forward_op_id)
    wanted = saved.forward_op_id * count + saved.storage_id
    place = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
    is_read = ~is_own & (known[place] == wanted) if len(known) else np.zeros(len(saved), dtype=np.bool_)
    maker = np.where(is_own, created, saved.forward_op_id)
    maker[is_read] = readers[place[is_read]]
    return saved.replace(module_id=ops.module_id[maker])
