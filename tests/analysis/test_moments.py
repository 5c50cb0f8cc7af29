"""The peak, and the maxima of phases and categories."""

from __future__ import annotations

import pytest
from hypothesis import given

from memprof.analysis.report.moments import find_category_maxima, find_peak, find_phase_peaks
from memprof.analysis.report.sources import find_sources
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from tests.building import Module, Op, Storage, make_step, make_trace
from tests.strategies import jobs


@pytest.fixture
def step() -> Step:
    """Live bytes: 140, 170 (20 of them workspace), 190, 90, 50 over forward, forward, backward, backward, optimizer."""
    ops = [
        Op("aten.mm.default", module="fc", makes=["a"], reads=["w"], stack="/job/a.py:1:f"),
        Op("aten.relu.default", module="", makes=["b"], reads=["a"], workspace=20, stack="/job/a.py:2:f"),
        Op("aten.relu_backward.default", "backward", "", makes=["t"], reads=["b"], frees=["a"], stack="/job/a.py:2:f"),
        Op("aten.mm.default", "backward", "fc", frees=["b", "t"], reads=["b"]),
        Op("aten.add_.Tensor", "optimizer", makes=["m"], mutates=["w"]),
    ]
    storages = [
        Storage("w", 40, "parameter"),
        Storage("a", 100),
        Storage("b", 10),
        Storage("t", 40, "temporary"),
        Storage("m", 10, "optimizer_state"),
    ]
    return make_step(ops, storages)


def test_the_peak_names_what_runs_there(step: Step) -> None:
    """190 bytes in backward; the root module has no name of its own, so its type is its title."""
    peak = find_peak(step, find_sources(step.stacks))
    assert (peak.op_id, peak.phase, peak.op, peak.allocated_bytes) == (2, "backward", "aten.relu_backward.default", 190)
    assert (peak.module, peak.module_title) == ("", "Model")
    assert peak.source is not None
    assert peak.source.place == "a.py:2"
    assert peak.describe() == "backward of Model (aten.relu_backward.default), a.py:2"


def test_each_phase_has_its_fullest_moment(step: Step) -> None:
    """Phases that the step does not have are left out."""
    peaks = find_phase_peaks(step, find_sources(step.stacks))
    assert [(peak.phase, peak.op_id, peak.allocated_bytes) for peak in peaks] == [
        ("forward", 1, 170),
        ("backward", 2, 190),
        ("optimizer", 4, 50),
    ]
    assert peaks[2].module is None
    assert peaks[2].source is None
    assert peaks[2].describe() == "optimizer (aten.add_.Tensor)"


def test_each_category_has_its_own_maximum(step: Step) -> None:
    """Workspace is highest in the second operator, independent of the total peak."""
    maxima = {name: (one.maximum_bytes, one.op_id) for name, one in find_category_maxima(step).items()}
    assert maxima == {
        "parameter": (40, 0),
        "activation": (110, 1),
        "temporary": (40, 2),
        "optimizer_state": (10, 4),
        "workspace": (20, 1),
    }


@given(jobs())
def test_the_peak_is_the_fullest_of_the_phases(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """In every step of a random job, and no category's maximum can be above what was ever alive."""
    trace = make_trace(*job)
    for number in trace.recorded_steps:
        step = trace.step(number)
        sources = find_sources(step.stacks)
        peak = find_peak(step, sources).allocated_bytes
        assert peak == live_bytes(step).during.max()
        assert peak == max(moment.allocated_bytes for moment in find_phase_peaks(step, sources))


def test_phases_stand_in_the_order_of_the_step() -> None:
    """Phases named by the job are included, ordered by their maxima."""
    phases = ("other", "evaluation", "saving", "rollout 2", "forward", "backward", "optimizer", "other")
    step = make_step([Op(phase=phase, module="fc") for phase in phases], [Storage("w", 4)], [Module("fc")])
    peaks = find_phase_peaks(step, find_sources(step.stacks))
    assert [peak.phase for peak in peaks] == list(phases[:-1])
    assert peaks[3].describe() == "rollout 2 of fc (aten.mul.Tensor)"
