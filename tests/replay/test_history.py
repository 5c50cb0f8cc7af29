"""Live bytes over a whole recording: equal to the replay of each step, at any moment and in any range."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memprof.replay.history import History
from memprof.replay.live import alive_at, live_bytes
from memprof.trace.store import Trace
from tests.building import Op, Storage, make_trace

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
