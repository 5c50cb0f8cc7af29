"""Phases and steps of a history, identified by annotations and by stacks."""

from __future__ import annotations

import numpy as np

from memprof.trace.importers.columns import Annotation
from memprof.trace.importers.frames import NO_STACK, Stack
from memprof.trace.importers.phases import find_phases, step_table

STEP = "Optimizer.step#AdamW.step"


def spans(*ends: tuple[bool, float]) -> list[Annotation]:
    """Returns starts (True) and ends (False) of optimizer steps."""
    return [Annotation(STEP, is_start, time_us) for is_start, time_us in ends]


def test_an_end_without_its_start_reaches_back_to_the_beginning() -> None:
    """A recording that begins within a step of the optimizer has its end alone; later spans have both."""
    python = Stack(is_python=True)
    times = np.arange(8.0)
    found = find_phases([python] * 8, times, spans((False, 1.0), (True, 4.0), (False, 5.0)))
    assert found.phase.tolist() == ["optimizer"] * 2 + ["other"] * 2 + ["optimizer"] * 2 + ["other"] * 2


def test_two_ends_in_a_row_both_reach_back() -> None:
    """The second end's start is missing too, and is not taken from the span before."""
    found = find_phases([Stack(is_python=True)] * 6, np.arange(6.0), spans((True, 0.0), (False, 1.0), (False, 3.0)))
    assert found.phase.tolist() == ["optimizer"] * 4 + ["other"] * 2


def test_what_a_stack_shows_takes_precedence_over_the_span() -> None:
    """A closure's backward within the optimizer's span is backward; a stack without Python is autograd's thread."""
    stacks = [Stack(is_python=True), Stack(phase="backward", is_python=True), NO_STACK, Stack(is_python=True)]
    found = find_phases(stacks, np.arange(4.0), spans((True, 0.0), (False, 3.0)))
    assert found.phase.tolist() == ["optimizer", "backward", "backward", "optimizer"]


def test_steps_end_where_the_optimizer_does() -> None:
    """Two ends make three steps; the first and the last are not whole, and the cut one is no step of its own."""
    stacks = [Stack(is_python=True)] * 9
    found = find_phases(stacks, np.arange(9.0), spans((True, 1.0), (False, 2.0), (True, 4.0), (False, 5.0)))
    assert found.how == "ends of Optimizer.step annotations"
    assert found.starts.tolist() == [0, 3, 6]
    assert found.step.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert found.is_whole.tolist() == [False, True, False]
    steps = step_table(found, np.arange(9.0), is_cut_off=True)
    assert steps.kind.tolist() == ["warm_up", "recorded", "recorded"]
    assert steps.start_us.tolist() == [0.0, 3.0, 6.0]
