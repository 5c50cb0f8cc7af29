"""Steps cut by an index over all of them are those that masks over whole tables give."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import UsageError
from memprof.trace.cut import StepCuts, cuttable_steps
from memprof.trace.files.columns import AT_ONCE
from memprof.trace.schema import NONE, Memory, ModuleCalls, Modules, Ops, Saved, Stacks, Steps, Storages, Table, Uses
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.building import Op, Storage, assert_tables_equal, make_trace
from tests.synthetic import write_synthetic

_KINDS = ("recorded", "recorded", "warm_up", "plain")
_MOST_STORAGES = 12


class Tables(dict[type[Table], Any]):
    """The tables of a trace, those left out empty."""

    def table(self, kind: type[Table], /) -> Any:
        return self.get(kind, kind.empty())


def some_of(table: type[Table], /, **columns: Any) -> Table:
    """Builds a table of some of its columns; the others are as in an empty recording."""
    rows = len(next(iter(columns.values())))
    fill = {"id": NONE, "int": 0, "float": 0.0, "bool": True, "text": ""}
    return table.of(**{column.name: columns.get(column.name, [fill[column.kind]] * rows) for column in table.columns()})


@st.composite
def traces(draw: st.DrawFn) -> Tables:
    """Steps of few operators with gaps between them, some without any, and storages that live from any one to another.

    Tables are in the order of their ids or in none.
    """
    sizes = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.sampled_from(_KINDS)), max_size=6))
    ends = np.cumsum([gap + size for gap, size, _ in sizes], dtype=np.int64)
    last = int(ends[-1]) if len(ends) else 0
    some_op = st.integers(NONE, last)
    lives = [draw(st.tuples(some_op, some_op, some_op)) for _ in range(draw(st.integers(0, _MOST_STORAGES)))]
    ids = draw(st.permutations(range(len(lives))))
    some_storage = st.sampled_from([NONE, *ids])
    reads = draw(st.lists(st.tuples(some_op, some_storage, some_op), max_size=20))
    if draw(st.booleans()):
        reads.sort()
    calls = draw(st.lists(st.tuples(st.integers(0, 6), some_op, st.integers(NONE, 5)), max_size=6))
    if draw(st.booleans()):
        calls.sort()
    op_ids = list(range(last))
    if draw(st.booleans()):
        op_ids.reverse()
    has_ops = [size > 0 for _, size, _ in sizes]
    return Tables(
        {
            Steps: some_of(
                Steps,
                step=range(len(sizes)),
                kind=[kind for *_, kind in sizes],
                duration_us=np.arange(len(sizes), dtype=np.float64),
                first_op_id=np.where(has_ops, ends - [size for _, size, _ in sizes], NONE),
                last_op_id=np.where(has_ops, ends - 1, NONE),
            ),
            Ops: some_of(Ops, op_id=op_ids, forward_op_id=[op // 2 for op in op_ids]),
            Storages: some_of(
                Storages,
                storage_id=ids,
                module_id=[born % 3 - 1 for born, *_ in lives],
                category=["gradient" if freed % 2 else "activation" for _, freed, _ in lives],
                created_op_id=[born for born, *_ in lives],
                freed_op_id=[freed if freed == NONE else max(born, freed) for born, freed, _ in lives],
                held_op_id=[held for *_, held in lives],
            ),
            Uses: some_of(Uses, op_id=[op for op, *_ in reads], storage_id=[read for _, read, _ in reads]),
            Saved: some_of(
                Saved,
                storage_id=[read for _, read, _ in reads],
                forward_op_id=[op for op, *_ in reads],
                released_op_id=[released for *_, released in reads],
            ),
            Memory: some_of(Memory, op_id=[op for op, *_ in reads]),
            ModuleCalls: some_of(
                ModuleCalls,
                module_call_id=range(len(calls)),
                step=[number for number, *_ in calls],
                parent_call_id=[parent for *_, parent in calls],
                first_op_id=[op for _, op, _ in calls],
                last_op_id=[op for _, op, _ in calls],
            ),
        }
    )


def by_masks(trace: Tables, number: int) -> dict[str, Any]:
    """Returns what a step holds, by looking at every row of every table."""
    steps, storages = trace.table(Steps), trace.table(Storages)
    row = steps.step.tolist().index(number)
    first, last = int(steps.first_op_id[row]), int(steps.last_op_id[row])

    def of_step(kind: type[Table], column: str) -> Any:
        table = trace.table(kind)
        return table.take((getattr(table, column) >= first) & (getattr(table, column) <= last))

    def own(ids: Any) -> Any:
        return np.where((ids >= first) & (ids <= last), ids - first, NONE)

    is_alive = (storages.created_op_id <= last) & ((storages.freed_op_id == NONE) | (storages.freed_op_id >= first))
    alive = storages.take(is_alive)
    alive = alive.take(np.lexsort((alive.storage_id, alive.created_op_id)))
    rows = {storage: place for place, storage in enumerate(alive.storage_id.tolist())}
    calls = trace.table(ModuleCalls)
    calls = calls.take(calls.step == number)
    call_rows = {call: place for place, call in enumerate(calls.module_call_id.tolist())}
    is_trained = (storages.module_id != NONE) & (storages.category == "gradient")
    ops, uses, memory = of_step(Ops, "op_id"), of_step(Uses, "op_id"), of_step(Memory, "op_id")
    saved = of_step(Saved, "forward_op_id")
    return {
        "ops": ops.replace(op_id=ops.op_id - first, forward_op_id=own(ops.forward_op_id)),
        "storages": alive.replace(
            storage_id=np.arange(len(alive)),
            created_op_id=own(alive.created_op_id),
            freed_op_id=own(alive.freed_op_id),
            held_op_id=own(alive.held_op_id),
        ),
        "uses": uses.replace(op_id=uses.op_id - first, storage_id=looked_up(rows, uses.storage_id)),
        "saved": saved.replace(
            storage_id=looked_up(rows, saved.storage_id),
            forward_op_id=saved.forward_op_id - first,
            released_op_id=own(saved.released_op_id),
        ),
        "memory": memory.replace(op_id=memory.op_id - first),
        "module_calls": calls.replace(
            module_call_id=np.arange(len(calls)),
            parent_call_id=looked_up(call_rows, calls.parent_call_id),
            first_op_id=own(calls.first_op_id),
            last_op_id=own(calls.last_op_id),
        ),
        "modules": trace.table(Modules),
        "stacks": trace.table(Stacks),
        "storage_ids": alive.storage_id,
        "trained_modules": tuple(sorted(set(storages.module_id[is_trained].tolist()))),
        "first_op_id": first,
    }


def looked_up(rows: dict[int, int], ids: Any) -> Any:
    return np.array([rows.get(one, NONE) for one in ids.tolist()], dtype=np.int64)


@given(trace=traces(), backwards=st.booleans())
def test_a_cut_by_index_is_the_cut_by_masks(trace: Tables, backwards: bool) -> None:
    """Whatever order tables have and steps are cut in, with one index for all steps."""
    cuts, steps = StepCuts(trace), trace[Steps]
    numbers = steps.step[cuttable_steps(steps)].tolist()
    for number in numbers[:: -1 if backwards else 1]:
        assert_cut(cuts.cut(number), by_masks(trace, number))


def assert_cut(step: Step, wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        found = getattr(step, name)
        if isinstance(value, Table):
            assert_tables_equal(value, found)
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found, value, err_msg=name)
        else:
            assert found == value, name


def test_what_is_freed_between_two_steps_is_in_neither() -> None:
    """Operators between steps, such as those of an evaluation, may make and free storages of their own."""
    trace = Tables(
        {
            Steps: some_of(Steps, step=[0, 1], kind=["recorded"] * 2, first_op_id=[0, 5], last_op_id=[1, 6]),
            Ops: some_of(Ops, op_id=range(7)),
            Storages: some_of(
                Storages,
                storage_id=range(5),
                created_op_id=[NONE, 0, 2, 2, 1],
                freed_op_id=[NONE, 3, 4, 5, 5],
            ),
        }
    )
    cuts = StepCuts(trace)
    assert cuts.cut(0).storage_ids.tolist() == [0, 1, 4]
    assert cuts.cut(1).storage_ids.tolist() == [0, 4, 3]
    assert cuts.cut(1).storages.freed_op_id.tolist() == [NONE, 0, 0]


def test_a_step_without_operators_is_not_cut() -> None:
    trace = make_trace([[Op(makes=["a"])], [], [Op(frees=["a"])]], [Storage("a", 8)])
    assert [trace.step(number).storage_ids.tolist() for number in (2, 0)] == [[0], [0]]
    with pytest.raises(UsageError, match="no operators of step 1; recorded steps: 0, 2"):
        trace.step(1)


def test_a_cut_is_a_copy() -> None:
    """Policies change tables of a step, which must not reach the trace or another cut of the same step."""
    trace = make_trace([[Op(makes=["a"]), Op(frees=["a"])]], [Storage("a", 8)])
    step = trace.step(0)
    for field in ("ops", "storages", "uses", "memory"):
        for column in dataclasses.astuple(getattr(step, field)):
            column[:] = column[::-1].copy()
    assert trace.step(0).ops.op_id.tolist() == [0, 1]
    assert trace.table(Ops).op_id.tolist() == [0, 1]


def test_a_step_that_is_kept_keeps_no_others(tmp_path: Path) -> None:
    """Of a file whose trace is dropped: less than one column of the whole table, and all of its own are still there."""
    write_synthetic(tmp_path / "run.memprof", 200_000)
    trace = Trace.open(tmp_path / "run.memprof")
    starts = trace.fresh(0).table(Ops).start_us
    assert len(starts) > AT_ONCE
    tracemalloc.start()
    try:
        step = trace.fullest_step()
        assert len(step.ops.duration_us) == len(step.ops) < len(starts) / 50
        del trace
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < starts.nbytes
    finally:
        tracemalloc.stop()
    assert step.ops.start_us.tolist() == starts[step.first_op_id :][: len(step.ops)].tolist()


def test_a_trace_that_is_dropped_takes_its_tables_along() -> None:
    """At once: tables of long recordings are large, and a cycle would hold them until the collector runs."""
    trace = make_trace([[Op(makes=["a"])]], [Storage("a", 8)])
    step, dropped = trace.step(0), weakref.ref(trace)
    was_on = gc.isenabled()
    gc.disable()
    try:
        del trace
        assert dropped() is None
    finally:
        if was_on:
            gc.enable()
    assert step.storage_ids.tolist() == [0]
