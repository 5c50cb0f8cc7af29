"""Makes storages of memory that torch's allocator does not own: numpy's, shared, mapped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints


@dataclass(frozen=True)
class Foreign:
    """Foreign storages, by ascending address.

    Attributes:
        address: Where each is. Shape (foreign,).
        size_bytes: The largest tensor seen on it.
        first: Raw operator that returned it first; NONE when it was an input before.
        last: Raw operator that touched it last.
        storage: Storage of each touch; NONE for touches of torch's own memory. Shape (touches,).
        offset: Number of the first of them.
    """

    address: Ints
    size_bytes: Ints
    first: Ints
    last: Ints
    storage: Ints
    offset: int

    def of_address(self, address: Ints) -> Ints:
        """Returns the storage at each address; NONE where there is none."""
        if not len(self.address):
            return np.full(len(address), NONE, dtype=np.int64)
        place = np.minimum(np.searchsorted(self.address, address), len(self.address) - 1)
        return np.where(self.address[place] == address, self.offset + place, NONE)


def find_foreign(
    raw_op: Ints, address: Ints, size_bytes: Ints, is_write: Bools, is_foreign: Bools, offset: int
) -> Foreign:
    """Groups touches of foreign memory by address: one storage from the first touch to the last.

    Args:
        raw_op: Operator of each touch. Shape (touches,).
        address: Address of its storage.
        size_bytes: Bytes of its tensor.
        is_write: Touches by the operator that returned it.
        is_foreign: Touches of memory that no allocation explains.
        offset: Number of the first foreign storage.
    """
    unique, code = np.unique(address[is_foreign], return_inverse=True)
    ops = raw_op[is_foreign]
    first = np.full(len(unique), np.iinfo(np.int64).max)
    last = np.zeros(len(unique), dtype=np.int64)
    size = np.zeros(len(unique), dtype=np.int64)
    np.minimum.at(first, code, ops)
    np.maximum.at(last, code, ops)
    np.maximum.at(size, code, size_bytes[is_foreign])
    is_made = np.zeros(len(unique), dtype=np.bool_)
    is_made[code[is_write[is_foreign] & (ops == first[code])]] = True
    storage = np.full(len(address), NONE, dtype=np.int64)
    storage[is_foreign] = offset + code
    return Foreign(unique, size, np.where(is_made, first, NONE), last, storage, offset)
