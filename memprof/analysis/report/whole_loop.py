"""The moments of a whole loop: its steady step, and what is higher or besides it, such as evaluations and saves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from memprof.analysis.report.moments import Moment, describe_moment
from memprof.analysis.report.sources import find_sources
from memprof.trace.cut import cuttable_steps, rows_between
from memprof.trace.files.spool import WHOLE
from memprof.trace.fullest import live_during
from memprof.trace.schema import Ops, Steps, Storages
from memprof.trace.store import Trace
from memprof.units import format_bytes

_OF_STEPS = ("forward", "backward", "optimizer")
#: What runs between these; a moment of the loop only where it is the highest.
_BETWEEN = "other"
#: Peaks of steps that differ by less than this share of them count as equal.
_ALIKE = 0.002
STEADY = "steady"


@dataclass(frozen=True)
class LoopMoment:
    """The highest moment of one kind in a loop.

    Attributes:
        name: ``steady``, or a phase.
        moment: The moment.
        steps: How many steps have such a moment.
    """

    name: str
    moment: Moment
    steps: int

    def describe(self) -> str:
        """Describes it: ``evaluation 79.12 MiB (step 50, train.py:26)``."""
        place = "" if self.moment.source is None else f", {self.moment.source.place}"
        size = format_bytes(self.moment.allocated_bytes)
        return f"{self.name} {size}" if self.name == STEADY else f"{self.name} {size} (step {self.moment.step}{place})"


def find_loop_moments(trace: Trace) -> tuple[LoopMoment, ...]:
    """Returns the moments of a dry run of a whole loop, as `moments_of` does; none of other recordings."""
    return moments_of(trace) if any(note.startswith(WHOLE) for note in trace.manifest.notes) else ()


def moments_of(trace: Trace) -> tuple[LoopMoment, ...]:
    """Returns the moments of the recorded steps, the steady step's first, then by their bytes, highest first.

    Args:
        trace: The trace.
    """
    steps, ops = trace.table(Steps), trace.table(Ops)
    during = live_during(ops, trace.table(Storages)) + ops.workspace_bytes
    highest: dict[str, dict[int, tuple[int, int]]] = {}  # by phase and step: bytes, and the operator's row
    for row in np.flatnonzero(cuttable_steps(steps)):
        rows = rows_between(ops, steps.first_op_id[row], steps.last_op_id[row])
        phases, bytes_ = ops.phase[rows], during[rows]
        for phase in dict.fromkeys(phases.tolist()):
            place = int(np.argmax(np.where(phases == phase, bytes_, -1)))
            highest.setdefault(phase, {})[int(steps.step[row])] = int(bytes_[place]), rows.start + place
    trained: dict[int, tuple[int, int, str]] = {}
    for phase in _OF_STEPS:
        for number, (size, place) in highest.get(phase, {}).items():
            trained[number] = max(trained.get(number, (0, 0, "")), (size, place, phase))
    if not trained:
        return ()
    steady = _steady(trained)
    sources = find_sources(trace.step(steady).stacks)

    def moment(name: str, number: int, place: int, size: int, count: int) -> LoopMoment:
        step = trace.step(number)
        return LoopMoment(name, describe_moment(step, sources, int(ops.op_id[place]) - step.first_op_id, size), count)

    size, place, _ = trained[steady]
    alike = sum(abs(each[0] - size) <= _ALIKE * size for each in trained.values())
    found = []
    above = {number: each for number, each in trained.items() if each[0] > size * (1 + _ALIKE)}
    if above:
        number = min(above, key=lambda step: (-above[step][0], step))
        found.append(moment(above[number][2], number, above[number][1], above[number][0], len(above)))
    for phase, peaks in highest.items():
        if phase in _OF_STEPS:
            continue
        number = min(peaks, key=lambda step: (-peaks[step][0], step))
        if phase != _BETWEEN or peaks[number][0] > max(each[0] for each in trained.values()) * (1 + _ALIKE):
            found.append(moment(phase, number, peaks[number][1], peaks[number][0], len(peaks)))
    found.sort(key=lambda each: -each.moment.allocated_bytes)
    return (moment(STEADY, steady, place, size, alike), *found)


def describe_loop(trace: Trace) -> str:
    """Returns a sentence with the moments of a whole loop and how far it was followed; "" for other recordings."""
    moments = find_loop_moments(trace)
    reach = next((note for note in trace.manifest.notes if note.startswith(WHOLE)), "")
    if not moments:
        return ""
    return f"Moments: {', '.join(each.describe() for each in moments)}; {reach.partition(': ')[2].partition(';')[0]}."


def loop_json(trace: Trace) -> list[dict[str, Any]]:
    """Returns the moments of a whole loop as JSON containers."""
    return [
        {
            "moment": each.name,
            "step": each.moment.step,
            "phase": each.moment.phase,
            "op": each.moment.op,
            "source": None if each.moment.source is None else each.moment.source.place,
            "allocated_bytes": each.moment.allocated_bytes,
            "steps": each.steps,
        }
        for each in find_loop_moments(trace)
    ]


def _steady(trained: dict[int, tuple[int, int, str]]) -> int:
    """Returns the step whose peak most steps have, of equally many the lower one; the first step counts only alone."""
    sizes = {number: each[0] for number, each in trained.items() if number or len(trained) == 1}
    counts = Counter(sizes.values())
    common = min(counts, key=lambda size: (-counts[size], size))
    return next(number for number, size in sizes.items() if size == common)
