"""Compiled regions: many forward operators that have one backward node between them."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints


def makers_in_regions(
    maker: Ints, created: Ints, use_op: Ints, use_storage: Ints, is_inside: Bools, is_backward: Bools
) -> Ints:
    """Returns the forward operator that saved what each use reads, now also of the uses by compiled regions.

    What an operator of the region created was saved by that operator; what is older, by the first that reads it.

    Args:
        maker: Forward operator of each use's node; the first operator of a region. Shape (uses,).
        created: Operator that created the storage, NONE when older.
        use_op: Operator of each use.
        use_storage: Its storage.
        is_inside: Operators that compiled code ran. Shape (ops,).
        is_backward: Operators of backward.
    """
    is_forward = is_inside & ~is_backward
    is_read = is_inside[use_op] & is_backward[use_op] & (maker != NONE) & is_forward[maker]
    if not is_read.any():
        return maker
    begins = np.unique(maker[is_read])
    last_begun = np.searchsorted(begins, np.arange(len(is_forward)), side="right") - 1
    region = np.where(is_forward & (last_begun >= 0), begins[last_begun], NONE)

    is_own = is_read & (created != NONE) & (region[created] == maker)
    count = int(use_storage.max()) + 1
    readers = np.flatnonzero(region[use_op] != NONE)
    readers = readers[np.argsort(use_op[readers], kind="stable")]
    known, first = np.unique(region[use_op[readers]] * count + use_storage[readers], return_index=True)
    wanted = maker * count + use_storage
    place = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
    is_older = is_read & ~is_own & (created <= maker)
    if len(known):
        is_older &= known[place] == wanted
        maker = np.where(is_older, use_op[readers][first][place], maker)
    return np.where(is_own, created, maker)
