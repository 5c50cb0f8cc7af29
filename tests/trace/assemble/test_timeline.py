"""Operators and allocation events in one order, the allocator's own events, and failed requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from memprof.trace.assemble.memory.block_lives import outside_events, own_events, with_outside
from memprof.trace.assemble.memory.failures import is_fatal, kept_for_backward
from memprof.trace.assemble.timeline import Timeline, merge
from memprof.trace.files.spool import COLUMNS, Spool
from memprof.trace.files.trim import drop_warm_up
from memprof.trace.schema import NONE, Ops, OutOfMemory, Storages
from tests.building import Op, Storage, make_tables
from tests.trace.assemble.conftest import Moments, jobs


def merged(operators: list[tuple[int, int]], events: list[tuple[int, int, int]]) -> Timeline:
    """Merges operators (start, end) and events (time, address, bytes)."""
    starts, ends = np.array(operators, dtype=np.int64).reshape(-1, 2).T
    return merge(starts, ends, *np.array(events, dtype=np.int64).reshape(-1, 3).T)


def test_events_belong_to_the_operator_running() -> None:
    """What happens between an operator's start and end, both included, is its own."""
    timeline = merged([(10, 20), (30, 40)], [(10, 1, 8), (20, 2, 8), (30, 3, 8), (35, 3, -8), (40, 1, -8)])
    assert timeline.raw_op.tolist() == [0, 1]
    assert timeline.event_op.tolist() == [0, 0, 1, 1, 1]
    assert timeline.event_is_inside.all()


def test_a_free_between_operators_belongs_to_the_one_before() -> None:
    """Memory given back between two operators outlived the first, and was not its work; no row is made for it."""
    timeline = merged([(10, 20), (30, 40)], [(12, 1, 8), (25, 1, -8), (45, 2, -8)])
    assert timeline.raw_op.tolist() == [0, 1]
    assert timeline.event_op.tolist() == [0, 0, 1]
    assert timeline.event_is_inside.tolist() == [True, False, False]


def test_memory_taken_just_before_an_operator_is_its_own() -> None:
    """A number wrapped as a tensor ahead of an operator belongs to it, as does all taken after the last free."""
    timeline = merged([(10, 20), (30, 40)], [(22, 9, -8), (25, 1, 4), (26, 2, 4), (41, 1, -4), (42, 2, -4)])
    assert timeline.raw_op.tolist() == [0, 1]
    assert timeline.event_op.tolist() == [0, 1, 1, 1, 1]
    assert timeline.event_is_inside.tolist() == [False, True, True, False, False]


def test_memory_taken_and_given_back_between_operators_has_its_own_row() -> None:
    """A block that comes and goes between two operators is in neither, but in a row that begins when it is taken."""
    timeline = merged([(10, 20), (30, 40)], [(22, 1, 8), (25, 1, -8)])
    assert timeline.raw_op.tolist() == [0, NONE, 1]
    assert timeline.start_ns.tolist() == [10, 22, 30]
    assert timeline.event_op.tolist() == [1, 1]
    assert not timeline.event_is_inside.any()
    assert timeline.row_of_raw(2).tolist() == [0, 2]


def test_each_taking_after_a_free_between_operators_begins_a_row() -> None:
    """Taken twice, freed once, taken, freed: two rows, and what is taken last is the next operator's."""
    events = [(21, 1, 8), (22, 2, 8), (23, 1, -8), (24, 3, 8), (25, 3, -8), (26, 2, -8), (27, 4, 8)]
    timeline = merged([(10, 20), (30, 40)], events)
    assert timeline.raw_op.tolist() == [0, NONE, NONE, 1]
    assert timeline.start_ns.tolist() == [10, 21, 24, 30]
    assert timeline.event_op.tolist() == [1, 1, 1, 2, 2, 2, 3]
    assert timeline.event_is_inside.tolist() == [False] * 6 + [True]


def test_memory_before_the_first_operator() -> None:
    """Frees before anything belong to no row; memory that comes and goes before the first operator has a row."""
    timeline = merged([(10, 20)], [(1, 7, -8), (2, 1, 8), (3, 1, -8), (4, 8, -8)])
    assert timeline.raw_op.tolist() == [NONE, 0]
    assert timeline.event_op.tolist() == [NONE, 0, 0, 0]


def test_memory_taken_after_the_last_operator_has_a_row() -> None:
    """There is no operator to follow that it could belong to."""
    timeline = merged([(10, 20)], [(25, 1, 8), (26, 2, 8)])
    assert timeline.raw_op.tolist() == [0, NONE]
    assert timeline.event_op.tolist() == [1, 1]


def test_events_are_put_in_order_of_time() -> None:
    """Events received late, as by weak references, are placed where they happened; ties stay in the order received."""
    timeline = merged([(10, 20)], [(15, 1, 8), (12, 2, 8), (15, 1, -8)])
    assert timeline.event_time_ns.tolist() == [12, 15, 15]
    assert timeline.event_bytes.tolist() == [8, 8, -8]
    assert timeline.position(np.array([11, 12, 14, 15])).tolist() == [0, 1, 1, 3]


def test_an_event_at_the_moment_two_operators_meet_is_the_second_ones() -> None:
    """Clocks tie: an operator that starts when another ends takes the event of that moment."""
    assert merged([(10, 20), (20, 30)], [(20, 1, 8)]).event_op.tolist() == [1]


@given(jobs())
def test_rows_keep_the_order_of_time(job: Moments) -> None:
    """Operators keep their order, rows start in order, events never go back, and no taking is left without a row."""
    timeline = merged(job.operators, job.events)
    raw = timeline.raw_op[timeline.raw_op != NONE]
    assert raw.tolist() == list(range(len(job.operators)))
    assert (np.diff(timeline.start_ns) >= 0).all()
    assert (np.diff(timeline.event_op) >= 0).all()
    assert (timeline.event_op[timeline.event_bytes > 0] != NONE).all()
    assert (timeline.start_ns[timeline.row_of_raw(len(raw))] == [start for start, _ in job.operators]).all()


@given(jobs())
def test_rows_between_operators_are_made_only_for_what_ends_before_the_next(job: Moments) -> None:
    """Each row that is no operator holds a taking, and a free follows before the next operator, if there is one."""
    timeline = merged(job.operators, job.events)
    for row in np.flatnonzero(timeline.raw_op == NONE):
        changes = timeline.event_bytes[timeline.event_op == row]
        assert changes[0] > 0
        assert (timeline.raw_op[row:] == NONE).all() or changes[-1] < 0


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


NAMES = ["aten.mm.default", "profiler._record_function_exit._RecordFunction"]


def spool_of(operators: list[int], failures: list[int], fatal: list[int]) -> Spool:
    """Makes a recording of operators by the number of their name, some of which failed."""
    rows = np.zeros((len(operators), len(COLUMNS["operators"])), dtype=np.int64)
    rows[:, COLUMNS["operators"].index("name")] = operators
    records: dict[str, list[Any]] = {"out_of_memory": [{"op": op} for op in failures]}
    if fatal:
        records["fatal"] = list(fatal)
    return Spool(rows={"operators": rows}, records=records)


@pytest.mark.parametrize(
    ("operators", "failures", "fatal", "ended", "expected"),
    [
        ([0, 0, 0], [0, 2], [1], {"returncode": 1}, [False, True]),  # Python printed the second
        ([0, 0, 0], [0, 2], [], {"returncode": 3}, [False, True]),  # the job's own handler ended it
        ([0, 0, 0, 1], [2], [], {"returncode": 3}, [True]),  # the same, out of an optimizer's step
        ([0, 0, 0], [0, 1], [], {"returncode": 1}, [False, False]),  # it went on, and ended badly for another reason
        ([0, 0, 0], [2], [], {"returncode": 0}, [False]),  # it ended well
        ([0, 0, 0], [2], [], None, [False]),  # it is still running
        ([0, 0, 0], [2], [], {}, [False]),  # memprof was killed: how it ended is unknown
    ],
)
def test_what_ended_the_job(
    operators: list[int], failures: list[int], fatal: list[int], ended: dict[str, int] | None, expected: list[bool]
) -> None:
    """The one whose traceback Python printed, or the last where nothing ran since and the job did not end well."""
    spool = spool_of(operators, failures, fatal)
    assert [is_fatal(spool, number, NAMES, ended) for number in range(len(failures))] == expected


def test_forward_that_backward_did_not_come_to() -> None:
    """What forward made and is alive at the request waits for backward; what died before or backward made does not."""
    storages = [Storage("kept", 8), Storage("dead", 8), Storage("gradient", 8)]
    ops = [
        Op(makes=("kept", "dead")),
        Op(reads=("dead",), frees=("dead",)),
        Op(phase="backward", makes=("gradient",)),
        Op(phase="backward"),
    ]
    tables = make_tables([ops], [Storage(one.key, one.size, "temporary") for one in storages])
    made, table = tables[Storages], tables[Ops]
    assert isinstance(made, Storages)
    assert isinstance(table, Ops)
    failures = OutOfMemory.of(op_id=[3])
    assert kept_for_backward(made, failures, table).category.tolist() == ["activation", "temporary", "temporary"]
    assert kept_for_backward(made, OutOfMemory.of(op_id=[NONE]), table).category.tolist() == ["temporary"] * 3


def test_operators_are_numbered_anew_without_the_warm_up() -> None:
    """A request in a dropped warm-up has no operator any more; a later one has the same under a new number."""
    step = [Op(makes=("a",)), Op(reads=("a",), frees=("a",))]
    tables = make_tables([step, step], [Storage("a", 8)], kinds=("warm_up", "recorded"))
    tables[OutOfMemory] = OutOfMemory.of(op_id=[1, 3], requested_bytes=[5, 6])
    kept = drop_warm_up(tables)[OutOfMemory]
    assert isinstance(kept, OutOfMemory)
    assert kept.op_id.tolist() == [NONE, 1]
    assert kept.requested_bytes.tolist() == [5, 6]
