"""The step of a recording with the highest peak."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memprof.replay.live import live_bytes
from memprof.trace.manifest import Manifest
from memprof.trace.schema import TABLES, Steps
from memprof.trace.store import Trace
from tests.building import Op, Storage, Tables, make_tables


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
