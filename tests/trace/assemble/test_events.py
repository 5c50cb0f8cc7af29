"""Selects the allocator's own memory events."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.memory.block_lives import outside_events, own_events, with_outside


def own(events: list[tuple[int, int, int, int]], alive: tuple[int, ...] = ()) -> list[bool]:
    """Asks for events of (time, address, bytes, the allocator's count)."""
    columns = np.array(events, dtype=np.int64).reshape(-1, 4).T
    return own_events(*columns, np.array(alive, dtype=np.int64)).tolist()


def test_takings_and_frees_are_own_events() -> None:
    """Everything that the allocator counts is there, an address used again too."""
    assert own([(1, 7, 8, 8), (2, 7, -8, 4), (3, 7, 16, 20), (4, 9, -4, 16)]) == [True] * 4


def test_mapped_memory_is_left_out() -> None:
    """A file mapped and unmapped is reported with a count of 0: neither belongs to the allocator."""
    assert own([(1, 7, 4096, 0), (2, 8, 8, 8), (3, 7, -4096, 0)]) == [False, True, False]


def test_the_end_of_older_mapped_memory_is_left_out() -> None:
    """A file mapped before the recording is not a block of the allocator when it is unmapped."""
    assert own([(1, 7, -4096, 0)]) == [False]


def test_the_last_block_of_all_is_freed() -> None:
    """A count of 0 after the free of a block that was taken, or alive before, is the allocator's own."""
    assert own([(1, 7, 8, 8), (2, 7, -8, 0)]) == [True, True]
    assert own([(1, 7, -8, 0)], alive=(7,)) == [True]


def test_a_block_is_freed_once() -> None:
    """A weak reference reports the end of an older block just before the allocator does: the second is left out."""
    assert own([(1, 7, -8, -1), (2, 7, -16, 100), (3, 7, 8, 108)], alive=(7,)) == [True, False, True]


def test_of_two_reports_the_allocators_is_selected() -> None:
    """A weak reference reports the end of a recorded block just before the allocator does; its free is there once."""
    assert own([(1, 7, 8, 8), (2, 7, -8, -1), (3, 7, -8, 0), (4, 7, 8, 8)]) == [True, False, True, True]


def test_a_weak_reference_alone_ends_a_recorded_block() -> None:
    """Another thread dropped the last reference, and the allocator reported nothing."""
    assert own([(1, 7, 8, 8), (2, 7, -8, -1), (3, 9, 8, 16)]) == [True, True, True]


def test_a_storage_that_was_resized_ends_no_other_block() -> None:
    """Its memory was freed before, and the address belongs to a larger block now."""
    assert own([(1, 7, 8, 8), (2, 7, -8, 0), (3, 7, 16, 16), (4, 7, -8, -1)]) == [True, True, True, False]


def test_order_is_that_of_time() -> None:
    """The allocator's events arrive late, in batches: the first free reported may have come second."""
    assert own([(5, 7, -8, 100), (2, 7, -8, -1)]) == [False, True]


def test_memory_outside_the_allocator_is_added_to_its_count() -> None:
    """A block of 100 bytes is stated before, one of 10 is taken and freed by references. The allocator counts 5, then
    12 and 7 bytes of its own: with the others 105, 115, 122, 112 and 107. The free of its own block at 3, which a
    reference reports, is none of theirs."""
    address, size = np.array([1, 2, 1, 2, 1, 3]), np.array([5, 10, 7, -10, -5, -8])
    total = np.array([5, -1, 12, -1, 7, -1])
    alive = {"address": np.array([9, 3]), "size_bytes": np.array([-100, 8])}
    events = {"address": address, "size_bytes": size, "total": total}
    is_outside = outside_events(events, alive, is_native=True)
    assert is_outside.tolist() == [False, True, False, True, False, False]
    assert with_outside(size[:5], total[:5], is_outside[:5], 100).tolist() == [105, 115, 122, 112, 107]
    assert not outside_events(events, alive, is_native=False).any()
