"""Optimal schedules for a repeated part: recurrent steps, or identical layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.choices import Choices
from memprof.planners.graph.graph import Graph
from memprof.planners.graph.schedule import replay
from memprof.planners.graph.stages import Line, Stage, lines_of
from memprof.planners.graph.writing import Walk
from memprof.trace.schema import NONE, Floats, Ints

#: At most this many slot counts are tried.
_MOST_TRIES = 60

#: At most this many stages are distinguished.
_MOST_STAGES = 2000

#: Above this many steps, several are merged into one: the table grows with steps times slots.
_MOST_STEPS = 300

#: Approximate maximum number of slots; more are needed where internal states are many times larger than hidden ones.
_MOST_SLOTS = 1500


@dataclass(frozen=True, eq=False)
class Policy:
    """The optimal policy for every number of steps and slots.

    A slot holds one hidden state, which passes from step to step. The first slot holds the initial state. An internal
    state, everything a step's backward needs, takes more slots.

    Attributes:
        cost: Forward steps run, including the last one before each backward step, shape ``(steps + 1, slots + 1)``;
            infinite without a slot.
        keep: The step whose input or internal state is kept next, counted from 1; 0 for none.
        is_internal: Whether that is the internal state.
        internal_slots: Slots an internal state takes; 0 where only hidden states are kept.
    """

    cost: Floats
    keep: Ints
    is_internal: np.ndarray
    internal_slots: int


def policy_for(steps: int, slots: int, internal_slots: int = 0) -> Policy:
    """Solves the recurrence for all step and slot counts up to the given ones.

    ``C(t, m) = min over 1 <= y < t of y + C(t - y, m - 1) + C(y, m)``, with ``C(t, 1) = t (t + 1) / 2``; in the mixed
    form, the internal state of step ``y`` may be kept instead: ``y + C(t - y, m - alpha) + C(y - 1, m)``, and its
    backward runs without another forward.

    Source: Gruslys et al. 2016 (Memory-efficient backpropagation through time), sections 3.1 and 3.3.

    Args:
        steps: Largest number of steps, t.
        slots: Largest number of slots, m.
        internal_slots: Slots an internal state takes, alpha; 0 to keep hidden states only.
    """
    t = np.arange(steps + 1)
    cost = np.full((steps + 1, slots + 1), np.inf)
    keep = np.zeros((steps + 1, slots + 1), dtype=np.int64)
    is_internal = np.zeros((steps + 1, slots + 1), dtype=np.bool_)
    cost[0] = 0.0
    if slots >= 1:
        cost[:, 1] = t * (t + 1) / 2
    for m in range(1, slots + 1):
        column = cost[:, m]
        rest = cost[:, m - internal_slots] if internal_slots and m > internal_slots else None
        fewer = cost[:, m - 1]
        for n in range(1, steps + 1):
            if m > 1:
                column[n] = n if n == 1 else np.inf
                if n > 1:
                    tries = t[1:n] + fewer[n - 1 : 0 : -1] + column[1:n]
                    best = int(np.argmin(tries))
                    column[n], keep[n, m] = tries[best], best + 1
            if rest is not None:
                inner = t[1 : n + 1] + rest[n - 1 :: -1][:n] + column[:n]
                best = int(np.argmin(inner))
                if inner[best] < column[n]:
                    column[n], keep[n, m], is_internal[n, m] = inner[best], best + 1, True
    return Policy(cost, keep, is_internal, internal_slots)


@dataclass(frozen=True, eq=False)
class _Repeated:
    """The repeated part of a chain of stages: ``count`` steps of ``period`` stages each, from stage ``start``."""

    line: Line
    start: int
    period: int
    count: int
    internal_slots: int

    def step(self, number: int) -> tuple[Stage, ...]:
        """Returns the stages of one step, counted from 0."""
        first = self.start + number * self.period
        return self.line.stages[first : first + self.period]


class Bptt(Planner):
    """Keeps the states of a repeated part by a table of optimal policies; the rest of the step is unchanged.

    The repeated part is detected in the step: adjacent stages with the same operators, sizes and readers. Each slot
    count has one best schedule with hidden states only and one with internal states too; the fastest whose replay fits
    is returned, so a larger budget never gives a slower schedule.

    Source: Gruslys et al. 2016 (Memory-efficient backpropagation through time), sections 3.1 to 3.3.
    """

    name: ClassVar[str] = "bptt"
    source: ClassVar[str] = "Gruslys et al. 2016, sections 3.1 (hidden states) and 3.3 (mixed)"
    summary: ClassVar[str] = "keeps some states of recurrent steps or identical layers, by dynamic programming"

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Searches for the fastest schedule within the budget."""
        graph, choices = task.graph, Choices(task)
        if choices.is_met:
            return choices.met()
        parts = [part for line in lines_of(graph, most_stages=_MOST_STAGES) if (part := _repeated(graph, line))]
        for runs in _schedules(graph, parts, choices.is_late):
            choices.add(replay(graph, runs), "keeps some states of the repeated part")
        found = choices.found()
        if not parts and found.status == "nothing found":
            return replace(found, reason="No part of the step repeats.")
        return found


def _schedules(graph: Graph, parts: list[_Repeated], is_late: Callable[[], bool]) -> Iterator[Ints]:
    """Yields the best schedule for some slot counts, from the most to one; they do not depend on the budget."""
    if not parts:
        return
    longest = max(part.count for part in parts)
    for has_internal in (False, True):
        widest = max(part.internal_slots for part in parts) if has_internal else 1
        most = longest * widest + 1
        slots = np.unique(np.geomspace(1, most, min(most, _MOST_TRIES)).astype(int))[::-1]
        if is_late():
            return
        tables = [policy_for(part.count, most, part.internal_slots if has_internal else 0) for part in parts]
        for number in slots.tolist():
            if is_late():
                return
            walk = Walk(graph)
            for part, table in zip(parts, tables, strict=True):
                _walk(walk, part, table, number)
            yield walk.runs()


def _walk(walk: Walk, part: _Repeated, table: Policy, slots: int) -> None:
    """Applies the policy for a slot count, and keeps everything of the stages before and after."""
    stages, end = part.line.stages, part.start + part.count * part.period
    for stage in stages[: part.start]:
        walk.save(stage, stage.values)

    # Pending work, next item last: stretches of steps with their slots, and what follows each.
    todo: list[tuple[str, int, int, int]] = [("solve", 0, part.count, slots)]
    while todo:
        what, first, count, left = todo.pop()
        if what == "backward":
            for stage in reversed(part.step(first)):
                walk.backward(stage)
        elif what == "drop":
            walk.drop(part.step(first)[-1].outputs)
        elif count:
            keep = int(table.keep[count, left])
            if table.is_internal[count, left]:
                _advance(walk, part, first, keep - 1)
                _save(walk, part, first + keep - 1)
                todo.append(("solve", first, keep - 1, left))
                todo.append(("backward", first + keep - 1, 0, 0))
                todo.append(("solve", first + keep, count - keep, left - table.internal_slots))
                if count == keep and first + count == part.count:
                    _tail(walk, stages, end)
            elif keep:
                _advance(walk, part, first, keep)
                todo.append(("solve", first, keep, left))
                todo.append(("drop", first + keep - 1, 0, 0))
                todo.append(("solve", first + keep, count - keep, left - 1))
            else:
                # One slot, or one step: recompute from the start for each.
                _advance(walk, part, first, count - 1)
                if first + count == part.count:
                    _save(walk, part, first + count - 1)
                    _tail(walk, stages, end)
                todo.append(("solve", first, count - 1, left))
                todo.append(("backward", first + count - 1, 0, 0))
    for stage in reversed(stages[: part.start]):
        walk.backward(stage)


def _tail(walk: Walk, stages: tuple[Stage, ...], end: int) -> None:
    """Runs the stages after the repeated part, forward and backward, the first time its end is reached."""
    for stage in stages[end:]:
        walk.save(stage, stage.values)
    for stage in reversed(stages[end:]):
        walk.backward(stage)


def _advance(walk: Walk, part: _Repeated, first: int, steps: int) -> None:
    passed = [stage for number in range(first, first + steps) for stage in part.step(number)]
    if passed:
        walk.advance(passed)


def _save(walk: Walk, part: _Repeated, number: int) -> None:
    for stage in part.step(number):
        walk.save(stage, stage.values)


def _repeated(graph: Graph, line: Line) -> _Repeated | None:
    """Finds the longest repeated stretch of stages; None for none."""
    kinds: dict[tuple[object, ...], int] = {}
    reads, made = graph.reads_by_op(), graph.values_by_op()
    kind = np.array([kinds.setdefault(_pattern(graph, stage, reads, made), len(kinds)) for stage in line.stages])
    best: tuple[int, int, int, int] | None = None
    for period in range(1, len(kind) // 2 + 1):
        same = np.append(kind[period:] == kind[:-period], False)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            count = (end - start) // period + 1
            if count >= 2 and (best is None or (count * period, -period) > best[:2]):
                best = (count * period, -period, start, count)
    if best is None:
        return None
    period, start, count = -best[1], best[2], best[3]
    together = -(-count // _MOST_STEPS)
    start += count % together * period  # the remainder belongs to the part before
    period, count = period * together, count // together
    size, saved = graph.value_bytes, graph.is_saved()
    step = line.stages[start : start + period]
    hidden = max(int(size[list(step[-1].outputs)].sum()), 1)
    internal = sum(int(size[value]) for stage in step for value in stage.values if saved[value])
    return _Repeated(line, start, period, count, max(1, min(-(-internal // hidden), _MOST_SLOTS // count)))


def _pattern(graph: Graph, stage: Stage, reads: list[list[int]], made: list[list[int]]) -> tuple[object, ...]:
    """Returns what repeated stages have in common: sizes made, readers of each value, and values passed on."""
    place = {value: number for number, value in enumerate((*stage.inputs, *stage.values))}
    ops = [op_id for op_id in range(stage.first_op, stage.end_op) if made[op_id]]
    return (
        tuple(int(graph.value_bytes[value]) for value in place),
        tuple(tuple(sorted(place.get(value, NONE) for value in reads[op_id])) for op_id in ops),
        tuple(tuple(sorted(place.get(value, NONE) for value in made[op_id])) for op_id in ops),
        tuple(place[value] for value in stage.outputs),
    )
