"""Derives the steps and phases of a history: from annotations where present, else from stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memprof.trace.importers.columns import Annotation
from memprof.trace.importers.frames import NO_STACK, Stack
from memprof.trace.schema import Bools, Floats, Ints, Steps, Texts

_OPTIMIZER_STEP = "Optimizer.step#"
_PROFILER_STEP = "ProfilerStep"


@dataclass(frozen=True, eq=False)
class Phases:
    """The phase and step of each operator; each of shape ``(ops,)``.

    Attributes:
        phase: Forward, backward, optimizer or other.
        step: Number of the step, 0 first.
        starts: First operator of each step, shape ``(steps,)``.
        is_whole: Which steps are complete.
        how: How steps were determined, a clause; "" where there is one step only.
        numbers: Number of each step, shape ``(steps,)``.
    """

    phase: Texts
    step: Ints
    starts: Ints
    is_whole: Bools
    how: str
    numbers: Ints


#: Derives the steps and phases of operators from their stacks and times.
FindPhases = Callable[[Sequence[Stack], Floats], Phases]


def find_phases(stacks: Sequence[Stack], time_us: Floats, annotations: Sequence[Annotation]) -> Phases:
    """Derives phases and steps.

    Args:
        stacks: The stack of each operator; the first operator is the beginning of the recording, without a stack.
        time_us: Time of each; NaN where unknown.
        annotations: Named time spans.
    """
    phase = np.array([stack.phase for stack in stacks], dtype=object)
    has_python = any(stack.is_python for stack in stacks)
    if has_python:
        # Autograd threads run no Python: where every other stack has Python frames, those without are backward's.
        without = np.array([stack is NO_STACK for stack in stacks], dtype=np.bool_)
        without[0] = False
        phase[without] = "backward"
    for start, end in _stretches(annotations, _OPTIMIZER_STEP):
        # A stack that shows a closure's forward or backward takes precedence.
        inside = (time_us >= start) & (time_us <= end) & (phase == "")
        phase[inside] = "optimizer"
    phase[phase == ""] = "other"
    starts, is_whole, how = _steps(phase, time_us, annotations)
    step = np.searchsorted(starts, np.arange(len(phase)), side="right") - 1
    return Phases(phase, step.astype(np.int64), starts, is_whole, how, np.arange(len(starts)))


def _steps(phase: Texts, time_us: Floats, annotations: Sequence[Annotation]) -> tuple[Ints, Bools, str]:
    """Returns the first operator of each step, which steps are complete, and how they were determined."""
    count = len(phase)
    profiler = [one for one in annotations if one.name.startswith(_PROFILER_STEP)]
    if sum(one.is_start for one in profiler) > 1:
        edges = _distinct(np.searchsorted(_filled(time_us), [one.time_us for one in profiler if one.is_start]), count)
        how = "ProfilerStep annotations"
    else:
        ends = [end for _, end in _stretches(annotations, _OPTIMIZER_STEP)]
        edges = _distinct(np.searchsorted(_filled(time_us), ends, side="right"), count)
        how = "ends of Optimizer.step annotations"
        if len(edges) < 2:
            edges = _ends_of_optimizer(phase)
            how = "stacks of optimizers"
    if len(edges) < 2:  # a step is delimited by its start and its end
        return np.array([0], dtype=np.int64), np.array([True]), ""
    starts = np.concatenate(([0], edges)).astype(np.int64)
    is_whole = np.ones(len(starts), dtype=np.bool_)
    is_whole[[0, -1]] = False
    return starts, is_whole, how


def _ends_of_optimizer(phase: Texts) -> Ints:
    """Returns the first operator of forward or backward after each update of an optimizer."""
    edges: list[int] = []
    last = ""
    for row, name in enumerate(phase.tolist()):
        if name == "other":
            continue
        if last == "optimizer" and name != "optimizer":
            edges.append(row)
        last = name
    return np.array(edges, dtype=np.int64)


def _stretches(annotations: Sequence[Annotation], prefix: str) -> list[tuple[float, float]]:
    """Pairs starts and ends; a truncated span extends to the edge of the recording."""
    stretches: list[tuple[float, float]] = []
    start: float | None = None
    for one in annotations:
        if not one.name.startswith(prefix):
            continue
        if one.is_start:
            start = one.time_us
        else:
            stretches.append((-np.inf if start is None else start, one.time_us))
            start = None
    return stretches


def _distinct(edges: Ints, count: int) -> Ints:
    """Returns the unique edges inside the recording that separate operators."""
    return np.unique(edges[(edges > 1) & (edges < count)]).astype(np.int64)


def _filled(time_us: Floats) -> Floats:
    """Returns non-decreasing times: an unknown time takes the value before it."""
    return np.maximum.accumulate(np.where(np.isnan(time_us), -np.inf, time_us))


def step_table(phases: Phases, time_us: Floats, is_cut_off: bool) -> Steps:
    """Builds the table of steps.

    An incomplete first step is a warm-up: it began before the recording, or includes the model's construction.

    Args:
        phases: Steps and phases.
        time_us: Time of each operator.
        is_cut_off: The recording ends in the middle of a step.
    """
    starts = phases.starts
    ends = np.append(starts[1:], len(phases.step)) - 1
    times = _filled(time_us)
    known = np.isfinite(times)
    first = np.where(known[starts], times[starts], np.nan)
    behind = np.append(first[1:], times[-1] if known[-1] else np.nan)
    updates = [
        int("optimizer" in phases.phase[start : end + 1].tolist())
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    is_complete = phases.is_whole.copy()
    is_complete[0] |= len(starts) > 1  # its beginning is missing
    is_complete[-1] &= not is_cut_off
    return Steps.of(
        step=phases.numbers,
        kind=["recorded" if row or whole else "warm_up" for row, whole in enumerate(phases.is_whole.tolist())],
        start_us=first,
        duration_us=behind - first,
        micro_batches=np.zeros(len(starts)),
        optimizer_updates=updates,
        first_op_id=starts,
        last_op_id=ends,
        is_complete=is_complete,
    )
