"""Builds storages for memory that torch's allocator does not own: numpy, shared and mapped memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints


@dataclass(frozen=True)
class Foreign:
    """Foreign storages, by ascending address.

    Attributes:
        address: Address of each. Shape (foreign,).
        size_bytes: Size of the largest tensor seen on it.
        first: Raw operator that first returned it; NONE when it was an input before that.
        last: Raw operator that used it last.
        storage: Storage of each use; NONE for uses of torch's own memory. Shape (touches,).
        offset: Number of the first foreign storage.
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
    """Groups uses of foreign memory by address: one storage lives from the first use to the last.

    Args:
        raw_op: Operator of each use. Shape (touches,).
        address: Address of its storage.
        size_bytes: Bytes of its tensor.
        is_write: Uses by the operator that returned the tensor.
        is_foreign: Uses of memory that no allocation explains.
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
