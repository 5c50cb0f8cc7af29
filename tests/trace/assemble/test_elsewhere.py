"""Memory that the allocator counts without recorded events, or does not own."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memprof.trace.assemble.memory.block_lives import BlockLives, count, pair
from memprof.trace.assemble.memory.elsewhere import Elsewhere, Foreign, account, find_foreign
from memprof.trace.assemble.timeline import Timeline, merge
from memprof.trace.schema import NONE
from tests.trace.assemble.conftest import Moments, jobs


def merged_lives(
    operators: list[tuple[int, int]], events: list[tuple[int, int, int]], alive: dict[int, int] | None = None
) -> tuple[Timeline, BlockLives]:
    starts, ends = np.array(operators, dtype=np.int64).T
    timeline = merge(starts, ends, *np.array(events, dtype=np.int64).T)
    alive = alive or {}
    held = [np.array(values, dtype=np.int64) for values in (list(alive), list(alive.values()))]
    return timeline, pair(timeline, *held)


def accounted(timeline: Timeline, lives: BlockLives, *totals: int) -> Elsewhere:
    return account(timeline, lives, np.array(totals, dtype=np.int64))


def storages(elsewhere: Elsewhere) -> list[tuple[int, int, int]]:
    """Lists the storages as (bytes, row they appear in, row after which they are gone)."""
    columns = (elsewhere.size_bytes, elsewhere.created, elsewhere.freed)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def counters(timeline: Timeline, lives: BlockLives, elsewhere: Elsewhere) -> tuple[list[int], list[int]]:
    """Returns the counter before each row and its highest value in each."""
    start = int(lives.size_bytes[lives.born == NONE].sum()) + elsewhere.start_bytes
    is_void = np.zeros(len(timeline.event_bytes), dtype=np.bool_)
    counter = count(timeline, lives, start, is_void, elsewhere.change, elsewhere.relief)
    return counter.before.tolist(), counter.peak.tolist()


THREE = [(0, 9), (20, 29), (40, 49)]


#: Each operator takes 8 bytes, and nothing is freed.
TAKINGS = [(1, 100, 8), (21, 200, 8), (41, 300, 8)]


def test_nothing_is_made_of_a_count_that_adds_up() -> None:
    """If every counted byte has an event, there is no memory from elsewhere."""
    timeline, lives = merged_lives(THREE, TAKINGS)
    elsewhere = accounted(timeline, lives, 8, 16, 24)
    assert storages(elsewhere) == []
    assert (elsewhere.start_bytes, elsewhere.missing_bytes) == (0, 0)
    assert counters(timeline, lives, elsewhere) == ([0, 8, 16], [8, 16, 24])


def test_another_threads_memory_appears_and_goes() -> None:
    """100 bytes are there when the second operator ends and gone when the third does: a storage of the second's row."""
    timeline, lives = merged_lives(THREE, TAKINGS)
    elsewhere = accounted(timeline, lives, 8, 116, 24)
    assert storages(elsewhere) == [(100, 1, 1)]
    assert counters(timeline, lives, elsewhere) == ([0, 8, 16], [8, 116, 24])


def test_another_threads_memory_stays() -> None:
    """Memory that is not freed stays to the end."""
    timeline, lives = merged_lives(THREE, TAKINGS)
    elsewhere = accounted(timeline, lives, 8, 116, 124)
    assert storages(elsewhere) == [(100, 1, NONE)]
    assert counters(timeline, lives, elsewhere) == ([0, 8, 116], [8, 116, 124])


def test_memory_given_back_in_parts_is_several_storages() -> None:
    """Of 100 bytes 30 go while the third operator runs: 30 that end before it, and 70 that stay."""
    timeline, lives = merged_lives(THREE, TAKINGS)
    elsewhere = accounted(timeline, lives, 8, 116, 94)
    assert storages(elsewhere) == [(30, 1, 1), (70, 1, NONE)]
    assert counters(timeline, lives, elsewhere) == ([0, 8, 86], [8, 116, 94])


def test_memory_of_a_kernels_own_threads_is_workspace() -> None:
    """What comes and goes within one operator makes no storage, and is in that operator's peak."""
    timeline, lives = merged_lives([(0, 9), (20, 29)], [(1, 100, 8), (3, 101, 8), (5, 102, 8), (21, 103, 8)])
    elsewhere = accounted(timeline, lives, 8, 116, 24, 32)
    assert storages(elsewhere) == []
    assert counters(timeline, lives, elsewhere) == ([0, 24], [116, 32])


def test_memory_there_at_the_start_is_a_storage() -> None:
    """The allocator counted 800 bytes more than Python held (200): memory of C++ objects, or of other threads."""
    timeline, lives = merged_lives(THREE, TAKINGS, {900: 200})
    elsewhere = accounted(timeline, lives, 1008, 1016, 1024)
    assert (elsewhere.start_bytes, elsewhere.missing_bytes) == (800, 0)
    assert storages(elsewhere) == [(800, NONE, NONE)]
    assert counters(timeline, lives, elsewhere) == ([1000, 1008, 1016], [1008, 1016, 1024])


def test_held_memory_that_the_allocator_does_not_count_is_told() -> None:
    """Python holds 200 bytes, of which the allocator knows 50: 150 are missing in its count, and no storage is made."""
    timeline, lives = merged_lives(THREE, TAKINGS, {900: 200})
    elsewhere = accounted(timeline, lives, 58, 66, 74)
    assert (elsewhere.start_bytes, elsewhere.missing_bytes) == (0, 150)
    assert storages(elsewhere) == []


def test_what_nobody_took_is_not_given_back() -> None:
    """A count that falls below what is known takes nothing away from known storages."""
    timeline, lives = merged_lives(THREE, TAKINGS)
    elsewhere = accounted(timeline, lives, 8, 10, 18)
    assert storages(elsewhere) == []
    assert counters(timeline, lives, elsewhere) == ([0, 8, 16], [8, 16, 24])


def test_memory_gone_before_the_first_operator_is_in_no_row() -> None:
    """800 bytes from elsewhere are there at the first event and gone at the second, before any operator ran."""
    timeline, lives = merged_lives([(20, 29)], [(1, 900, -8), (2, 901, -8), (21, 100, 8)], {900: 8, 901: 8})
    elsewhere = accounted(timeline, lives, 808, 0, 8)
    assert storages(elsewhere) == []
    assert counters(timeline, lives, elsewhere) == ([0], [8])


@given(jobs(), st.data())
def test_the_replay_reaches_the_allocators_count(job: Moments, data: st.DataObject) -> None:
    """Whatever other threads do, the counter followed is the allocator's own at the last event of each row."""
    if not job.events or not job.operators:
        return
    timeline, lives = merged_lives(job.operators, job.events, job.alive)
    others = data.draw(st.integers(0, 500))
    totals, own = [], sum(job.alive.values())
    for _, _, size in job.events:
        others += data.draw(st.one_of(st.just(0), st.integers(-others, 500)))
        own += size
        totals.append(own + others)
    elsewhere = accounted(timeline, lives, *totals)

    counter = sum(job.alive.values()) + elsewhere.start_bytes + np.cumsum(timeline.event_bytes + elsewhere.change)
    is_last = np.append(timeline.event_op[1:] != timeline.event_op[:-1], True)
    assert counter[is_last].tolist() == np.array(totals)[is_last].tolist()
    assert (elsewhere.freed[elsewhere.freed != NONE] >= elsewhere.created[elsewhere.freed != NONE]).all()


@given(jobs(), st.data())
def test_counter_and_storages_agree(job: Moments, data: st.DataObject) -> None:
    """Whatever other threads do: the counter before each row is the sum of the storages that are there."""
    if not job.events or not job.operators:
        return
    timeline, lives = merged_lives(job.operators, job.events, job.alive)
    totals = data.draw(
        st.lists(st.integers(0, 2**41), min_size=len(job.events), max_size=len(job.events)).map(np.cumsum)
        | st.lists(st.integers(0, 300), min_size=len(job.events), max_size=len(job.events))
    )
    elsewhere = accounted(timeline, lives, *(int(total) for total in totals))
    before, peak = counters(timeline, lives, elsewhere)
    known = np.concatenate([[0], np.cumsum(timeline.event_bytes)]) + sum(job.alive.values())
    for row in range(len(timeline.raw_op)):
        is_there = (elsewhere.created < row) & ((elsewhere.freed == NONE) | (elsewhere.freed >= row))
        own = known[np.searchsorted(timeline.event_op, row, side="left")]
        assert before[row] == own + elsewhere.size_bytes[is_there].sum()
        assert peak[row] >= before[row]


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
