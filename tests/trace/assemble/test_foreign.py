"""Memory that torch's allocator does not own."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.memory.elsewhere import Foreign, find_foreign
from memprof.trace.schema import NONE


def found(*touches: tuple[int, int, int, bool, bool], offset: int = 0) -> Foreign:
    """Finds storages among touches of (operator, address, bytes, by the operator that returned it, is foreign)."""
    columns = zip(*touches, strict=True)
    op, address, size, is_write, is_foreign = (np.array(column) for column in columns)
    return find_foreign(op, address, size, is_write, is_foreign, offset)


def test_touches_of_one_address_are_one_storage() -> None:
    """A numpy array read by operators 2 and 5 is one storage, as large as the largest tensor seen on it."""
    foreign = found((2, 700, 80, False, True), (5, 700, 400, False, True), (5, 900, 8, False, False), offset=10)
    assert foreign.address.tolist() == [700]
    assert foreign.size_bytes.tolist() == [400]
    assert foreign.first.tolist() == [NONE]  # it was there before: its first touch did not make it
    assert foreign.last.tolist() == [5]
    assert foreign.storage.tolist() == [10, 10, NONE]


def test_memory_that_an_operator_returned_is_made_by_it() -> None:
    """from_file returns mapped memory; where it is returned only later, it was there before."""
    foreign = found(
        (1, 700, 8, True, True), (3, 700, 8, False, True), (2, 600, 8, False, True), (4, 600, 8, True, True)
    )
    assert foreign.address.tolist() == [600, 700]
    assert foreign.first.tolist() == [NONE, 1]
    assert foreign.last.tolist() == [4, 3]


def test_storages_are_found_by_address() -> None:
    """Facts name memory by its address; an unknown address has no storage."""
    foreign = found((1, 700, 8, False, True), (1, 600, 8, False, True), offset=10)
    assert foreign.of_address(np.array([700, 650, 600, 800])).tolist() == [11, NONE, 10, NONE]
