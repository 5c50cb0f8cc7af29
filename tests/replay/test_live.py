"""Bytes alive at every operator, in a step and over a whole recording."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from memprof.replay.history import History
from memprof.replay.live import alive_at, live_bytes, live_bytes_by_category, peak_op
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.building import Op, Storage, make_step, make_trace
from tests.strategies import jobs


@pytest.fixture
def step() -> Step:
    """Three operators over a weight of 100 bytes live from before and an input of 10 that is freed after the first."""
    return make_step(
        [
            Op(makes=["a"], reads=["x", "w"], frees=["x"], workspace=7),
            Op(makes=["b", "c"], reads=["a"], frees=["a", "c"]),
            Op(reads=["b"], workspace=-3),
        ],
        [
            Storage("w", 100, "parameter"),
            Storage("x", 10, "input"),
            Storage("a", 20),
            Storage("b", 30),
            Storage("c", 5, "temporary"),
        ],
    )


def test_bytes_around_each_operator(step: Step) -> None:
    """Outputs come before anything dies, and the dead leave before the next operator takes memory."""
    live = live_bytes(step)
    assert live.before.tolist() == [110, 120, 130]
    # 110 + a 20 + workspace 7; 120 + b 30 + c 5; 130 - 3
    assert live.during.tolist() == [137, 155, 127]
    # 130 - x 10; 155 - a 20 - c 5; nothing dies
    assert live.after.tolist() == [120, 130, 130]


def test_bytes_by_category(step: Step) -> None:
    """Each category's share of the bytes during an operator, workspace as a category of its own."""
    split = {category: shares.tolist() for category, shares in live_bytes_by_category(step).items()}
    assert split == {
        "parameter": [100, 100, 100],
        "input": [10, 0, 0],
        "activation": [20, 50, 30],
        "temporary": [0, 5, 0],
        "workspace": [7, 0, -3],
    }


def test_alive_at_an_operator(step: Step) -> None:
    """Live during an operator are its outputs, storages freed right after it, and those that span it."""
    # Storages in order of birth: w and x from before, a, b, c.
    assert alive_at(step, 0).tolist() == [True, True, True, False, False]
    assert alive_at(step, 1).tolist() == [True, False, True, True, True]
    assert alive_at(step, 2).tolist() == [True, False, False, True, False]


def test_peak_is_the_first_of_equals(step: Step) -> None:
    """The peak is the operator with most bytes alive, the first where two are equal."""
    assert peak_op(step) == 1
    assert peak_op(make_step([Op(), Op(workspace=1), Op(workspace=1)], [Storage("w", 4)])) == 1


def test_a_step_without_operators_has_no_peak(step: Step) -> None:
    """A step without operators has no peak."""
    nothing = {name: getattr(step, name).take(slice(0, 0)) for name in ("ops", "storages", "uses", "saved", "memory")}
    with pytest.raises(ValueError, match="empty"):
        peak_op(dataclasses.replace(step, **nothing))


@given(jobs())
def test_replay_equals_the_counters(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """In any step the replayed bytes are the recorded counters to the byte, beyond the 2**53 a float can hold too."""
    trace = make_trace(*job)
    for number in trace.recorded_steps:
        step = trace.step(number)
        assert live_bytes(step).during.tolist() == step.memory.allocated_bytes.tolist()


@given(jobs())
def test_bytes_are_conserved(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """What is left after an operator is what the next finds, across steps too."""
    trace = make_trace(*job)
    lives = [live_bytes(trace.step(number)) for number in trace.recorded_steps]
    before = np.concatenate([live.before for live in lives])
    after = np.concatenate([live.after for live in lives])
    assert before[1:].tolist() == after[:-1].tolist()


@given(jobs())
def test_parts_sum_to_the_whole(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """Categories sum to the bytes during every operator, and so do the storages alive then and the workspace."""
    trace = make_trace(*job)
    for number in trace.recorded_steps:
        step = trace.step(number)
        during = live_bytes(step).during
        assert np.sum(list(live_bytes_by_category(step).values()), axis=0).tolist() == during.tolist()
        for op_id in range(len(step.ops)):
            alive = int(step.storages.allocated_bytes[alive_at(step, op_id)].sum())
            assert alive + step.ops.workspace_bytes[op_id] == during[op_id]


SAMPLES = sorted((Path(__file__).parents[2] / "sample_traces").glob("*/run.memprof"))


@pytest.fixture(scope="module", params=SAMPLES, ids=lambda path: path.parent.name)
def trace(request: pytest.FixtureRequest) -> Trace:
    return Trace.open(request.param)


@pytest.fixture(scope="module")
def history(trace: Trace) -> History:
    return History(trace)


def test_total_by_hand() -> None:
    """What an operator makes is alive during it, what is freed after it still is; workspace counts once."""
    ops = [
        Op(makes=["a"], reads=["w"], workspace=5),
        Op(makes=["b"], frees=["a"]),
        Op(frees=["b"]),
        Op(),
    ]
    storages = [Storage("w", 100, "parameter"), Storage("a", 10), Storage("b", 20, "temporary")]
    history = History(make_trace([ops], storages))
    assert history.total.tolist() == [115, 130, 120, 100]
    assert history.categories == ("parameter", "activation", "temporary", "workspace")
    everywhere = np.arange(4)
    assert history.alive_bytes("activation", everywhere).tolist() == [10, 10, 0, 0]
    assert history.alive_bytes("temporary", everywhere).tolist() == [0, 20, 20, 0]
    assert history.alive_bytes("workspace", everywhere).tolist() == [5, 0, 0, 0]
    assert history.alive_bytes("gradient", everywhere).tolist() == [0, 0, 0, 0]
    assert [history.alive(at).tolist() for at in range(4)] == [[0, 1], [0, 1, 2], [0, 2], [0]]
    assert (history.peak(), history.peak(2), history.peak(0, 1)) == (1, 2, 0)
    assert history.bytes_of(np.array([False, True, True])).tolist() == [10, 30, 20, 0]


def test_total_is_that_of_every_step(trace: Trace, history: History) -> None:
    """Step by step, the replay of the step gives the same bytes, to the byte."""
    assert trace.recorded_steps
    for number in trace.recorded_steps:
        np.testing.assert_array_equal(history.total[history.step == number], live_bytes(trace.step(number)).during)


def test_categories_sum_to_the_total(history: History) -> None:
    """At every operator."""
    everywhere = np.arange(history.ops)
    split = [history.alive_bytes(name, everywhere) for name in history.categories]
    np.testing.assert_array_equal(np.sum(split, axis=0), history.total)


def test_what_is_alive_is_that_of_the_step(trace: Trace, history: History) -> None:
    """Its sizes and the workspace sum to the total, and the step's own rule finds as many."""
    number = trace.recorded_steps[-1]
    step, first = trace.step(number), int(np.flatnonzero(history.step == number)[0])
    for at in np.random.default_rng(3).integers(0, len(step.ops), 40).tolist():
        rows = history.alive(first + at)
        assert int(history.size[rows].sum()) + history.workspace(first + at) == history.total[first + at]
        assert int(step.storages.allocated_bytes[alive_at(step, at)].sum()) == int(history.size[rows].sum())


def test_all_storages_are_the_total_without_workspace(history: History) -> None:
    """Bytes of a choice of storages: of all, of none, and of two halves that sum up."""
    workspace = np.array([history.workspace(op_id) for op_id in range(history.ops)])
    everything = np.ones(len(history.size), dtype=np.bool_)
    half = np.arange(len(history.size)) % 2 == 0
    np.testing.assert_array_equal(history.bytes_of(everything) + workspace, history.total)
    np.testing.assert_array_equal(history.bytes_of(half) + history.bytes_of(~half), history.bytes_of(everything))
    assert not history.bytes_of(~everything).any()


def test_without_operators() -> None:
    """An empty recording is valid."""
    history = History(make_trace([[]], []))
    assert (history.ops, history.total.tolist(), history.categories) == (0, [], ())
