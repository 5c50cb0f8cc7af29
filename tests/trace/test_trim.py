"""Leaving the warm-up out of a recording, and its step with the highest peak."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.replay.live import live_bytes
from memprof.trace.files.trim import drop_warm_up
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, TABLES, AllocatorEvents, Memory, ModuleCalls, Ops, Steps, Storages, Uses
from memprof.trace.store import Trace
from tests.building import Op, Storage, Tables, assert_tables_equal, make_tables
from tests.strategies import jobs


@pytest.fixture
def tables() -> Tables:
    """A warm-up of two operators, then two recorded steps of one; ``state`` is born in the warm-up and lives on."""
    warm_up = [
        Op(module="net", makes=["state", "brief"]),
        Op(reads=["brief"], frees=["brief", "old"], saves=["weight"], phase="backward"),
    ]
    recorded = [Op(module="net", reads=["state", "weight"], makes=["y"], frees=["y"], saves=["state"])]
    storages = [Storage("weight", 64, "parameter"), Storage("old", 8), Storage("state", 32, "optimizer_state")]
    storages += [Storage("brief", 16), Storage("y", 4)]
    return make_tables([warm_up, recorded, recorded], storages, kinds=["warm_up", "recorded", "recorded"])


def test_warm_up_goes_and_what_outlives_it_stays(tables: Tables) -> None:
    """Operators of the warm-up and storages that died in it go; ids are dense again; what lives on is from before."""
    trimmed = Trace.of([(Manifest(), drop_warm_up(tables))], "trimmed")
    assert trimmed.table(Ops).op_id.tolist() == [0, 1]
    assert trimmed.table(Ops).step.tolist() == [1, 2]
    storages = trimmed.table(Storages)
    assert storages.storage_id.tolist() == [0, 1, 2, 3]
    assert storages.allocated_bytes.tolist() == [64, 32, 4, 4]  # weight, state, y, y again
    assert storages.created_op_id.tolist() == [NONE, NONE, 0, 1]
    assert storages.freed_op_id.tolist() == [NONE, NONE, 0, 1]
    assert trimmed.table(Uses).storage_id.tolist() == [1, 0, 2, 1, 0, 3]
    assert trimmed.table(Memory).allocated_bytes.tolist() == [100, 100]
    assert trimmed.table(AllocatorEvents).op_id.tolist() == [0, 0, 1, 1]
    assert trimmed.table(ModuleCalls).module_call_id.tolist() == [0, 1, 2, 3]
    assert trimmed.table(ModuleCalls).parent_call_id.tolist() == [NONE, 0, NONE, 2]


def test_rows_of_steps_stay(tables: Tables) -> None:
    """The warm-up is still told among the steps, without operators."""
    steps = Trace.of([(Manifest(), drop_warm_up(tables))], "trimmed").table(Steps)
    assert steps.kind.tolist() == ["warm_up", "recorded", "recorded"]
    assert steps.first_op_id.tolist() == [NONE, 0, 1]
    assert steps.last_op_id.tolist() == [NONE, 0, 1]


@pytest.mark.parametrize("kinds", [["warm_up", "warm_up", "warm_up"], ["warm_up", "recorded", "recorded"]])
def test_a_recording_that_ends_early_keeps_its_warm_up(tables: Tables, kinds: list[str]) -> None:
    """Without a complete recorded step the warm-up is all there is: nothing is removed."""
    steps = Steps.of(
        step=[0, 1, 2], kind=kinds, first_op_id=[0, 2, 3], last_op_id=[1, 2, 3], is_complete=[True, False, False]
    )
    tables[Steps] = steps
    kept = drop_warm_up(tables)
    for kind, table in tables.items():
        assert_tables_equal(kept[kind], table)


@given(jobs(), st.data())
def test_replaying_what_is_kept_gives_the_same(job: tuple[list[list[Op]], list[Storage]], data: st.DataObject) -> None:
    """In any job, every kept step is the same step after trimming, to the byte."""
    steps, storages = job
    warm = data.draw(st.integers(0, len(steps) - 1))
    tables = make_tables(steps, storages, kinds=["warm_up"] * warm + ["recorded"] * (len(steps) - warm))
    whole = Trace.of([(Manifest(), tables)], "whole")
    trimmed = Trace.of([(Manifest(), drop_warm_up(tables))], "trimmed")
    assert trimmed.recorded_steps == whole.recorded_steps == tuple(range(warm, len(steps)))
    kept = trimmed.table(Ops), trimmed.table(Storages)
    assert [len(table) for table in kept] == [kept[0].op_id.max() + 1, kept[1].storage_id.max(initial=-1) + 1]
    for number in trimmed.recorded_steps:
        one, other = whole.step(number), trimmed.step(number)
        other.check()
        for name in ("uses", "saved", "module_calls"):
            assert_tables_equal(getattr(one, name), getattr(other, name))
        assert_tables_equal(one.ops, other.ops)
        assert_tables_equal(one.storages, other.storages)
        assert_tables_equal(one.memory, other.memory)
        assert np.array_equal(one.born_bytes(), other.born_bytes())


def _trace(*sizes: int, incomplete: int | None = None, phases: dict[int, tuple[str, str]] | None = None) -> Trace:
    """Creates a trace whose steps have one activation of the given sizes in addition to a weight."""
    steps = []
    for number, size in enumerate(sizes):
        first, last = (phases or {}).get(number, ("forward", "backward"))
        key = f"a{size}"
        steps.append([Op(phase=first, makes=(key,), reads=("w",)), Op(phase=last, reads=(key,), frees=(key,))])
    storages = [Storage("w", 100, "parameter"), *(Storage(f"a{size}", size) for size in sorted(set(sizes)))]
    tables: Tables = make_tables(steps, storages)
    if incomplete is not None:
        rows = tables[Steps]
        assert isinstance(rows, Steps)
        tables[Steps] = rows.replace(is_complete=rows.step != incomplete)
    return Trace.of([(Manifest(), tables)], "by-hand.memprof")


@pytest.mark.parametrize("sample", ["gpt", "lstm", "resnet"])
def test_peaks_are_those_of_the_replay(sample: str) -> None:
    """Peaks read from the tables equal those of each step's replay."""
    trace = Trace.open(Path("sample_traces") / sample / "run.memprof")
    peaks = trace.step_peaks()
    assert tuple(peaks) == trace.recorded_steps
    assert peaks == {number: int(live_bytes(trace.step(number)).during.max()) for number in peaks}


def test_it_is_the_one_with_the_highest_peak() -> None:
    """The highest peak counts, wherever it is and however many other steps are alike."""
    trace = _trace(10, 400, 10)
    assert (trace.fullest_step().number, trace.steady_step().number) == (1, 2)
    assert {number: size - 100 for number, size in trace.step_peaks().items()} == {0: 10, 1: 400, 2: 10}


def test_among_equals_it_is_the_steady_one() -> None:
    """Nothing changes for jobs whose steps are alike."""
    trace = _trace(30, 30, 30)
    assert trace.fullest_step().number == trace.steady_step().number == 2


def test_a_step_that_is_cut_short_in_training_does_not_count() -> None:
    """The memory of the rest of the step is unknown."""
    trace = _trace(10, 30, 400, incomplete=2)
    assert (trace.fullest_step().number, tuple(trace.step_peaks())) == (1, (0, 1))


def test_what_follows_the_last_update_counts() -> None:
    """A job that ends in an evaluation has seen all of that."""
    trace = _trace(10, 30, 400, incomplete=2, phases={2: ("other", "other")})
    assert (trace.fullest_step().number, tuple(trace.step_peaks())) == (2, (0, 1, 2))
    assert trace.fullest_step(is_whole=True).number == 1


def test_a_job_that_only_evaluates_after_its_warm_up_is_known_by_that_too() -> None:
    """Its training steps were those of the warm-up."""
    trace = _trace(10, 30, 400, incomplete=2, phases={2: ("evaluation", "evaluation")})
    steps = trace.table(Steps)
    kinds = np.array(["warm_up", "warm_up", "recorded"], dtype=object)
    tables = {kind: trace.table(kind) for kind in TABLES} | {Steps: steps.replace(kind=kinds)}
    early = Trace.of([(Manifest(), tables)], "by-hand.memprof")
    assert tuple(early.step_peaks()) == (0, 1, 2)
    assert (early.fullest_step().number, early.fullest_step(is_whole=True).number) == (2, 1)


def test_where_nothing_else_was_recorded_a_part_counts() -> None:
    """The only step there is."""
    trace = _trace(50, incomplete=0)
    assert trace.fullest_step(is_whole=True).number == 0
    assert trace.step_peaks() == {0: 150}
