"""The moments of a whole loop: its steady step, and what is higher or besides it, such as evaluations and saves."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from memprof.analysis.report.moments import Moment, describe_moment
from memprof.analysis.report.sources import Sources, find_sources
from memprof.analysis.report.whole_run import ALIKE
from memprof.analysis.table import BYTES, NUMBER, TEXT, Column
from memprof.trace.cut import cuttable_steps, rows_between
from memprof.trace.files.spool import WHOLE
from memprof.trace.fullest import live_during
from memprof.trace.schema import Ops, Steps, Storages
from memprof.trace.store import Trace
from memprof.units import format_bytes_alike

_OF_STEPS = ("forward", "backward", "optimizer")
#: What runs between these; a moment of the loop only where it is the highest.
_BETWEEN = "other"
#: Phases that say little, and names for them by the functions that the job was in.
_UNSPECIFIC = (_BETWEEN, "evaluation")
_BY_FUNCTION = {
    name: re.compile(rf"(?<![a-z])(?:{words})(?![a-z])")
    for name, words in {
        "generation": "generat(?:es?|ing|ions?)|^sampl(?:es?|ing)|rollouts?|predict_step",
        "evaluation": "eval(?:s|uate|uation)?|valid(?:ate|ation)?|tests?",
        "saving": "saves?|saving|(?<!load_)state_dict",
        "loading": "loads?|loading|resume",
        "weight swap": "swap|ema|swa|averag(?:es?|ing)(?!_pool)|restore",
        "logging": "^(?:maybe_)?log(?!_(?:probs?|p|sum|softmax|sigmoid|likelihood|mel))|logs|logging|metrics?|report",
        "update": "optim(?:izers?)?|precondition(?:ers?)?|projectors?",
        "": "train(?:ing|er)?|fit",  # says nothing, as whoever does several of these
    }.items()
}
#: Name of the highest forward or backward above the steady step's.
_WORST_BATCH = "worst batch"
STEADY = "steady"


@dataclass(frozen=True)
class LoopMoment:
    """The highest moment of one kind in a loop.

    Attributes:
        name: ``steady``, ``worst batch``, or a phase, more exactly where the job's functions tell.
        moment: The moment.
        steps: How many steps have such a moment.
        of_steps: How many steps of the loop were followed.
    """

    name: str
    moment: Moment
    steps: int
    of_steps: int

    @property
    def place(self) -> str:
        """Where it is: `` (step 50, train.py:26)``; "" for the steady step."""
        if self.name == STEADY:
            return ""
        how_often = f", {self.steps:,} in {self.of_steps:,} steps" if self.name == _WORST_BATCH else ""
        place = "" if self.moment.source is None else f", {self.moment.source.place}"
        return f" (step {self.moment.step}{how_often}{place})"


LOOP_MOMENTS = (
    Column("moment", None, TEXT, attrgetter("name")),
    Column("step", None, NUMBER, attrgetter("moment.step")),
    Column("phase", None, TEXT, attrgetter("moment.phase")),
    Column("op", None, TEXT, attrgetter("moment.op")),
    Column("source", None, TEXT, lambda one: None if one.moment.source is None else one.moment.source.place),
    Column("allocated_bytes", None, BYTES, attrgetter("moment.allocated_bytes")),
    Column("steps", None, NUMBER),
)


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
        if name in _UNSPECIFIC:
            name = _named_by_function(sources, int(ops.stack_id[place]), name)
        at = describe_moment(step, sources, int(ops.op_id[place]) - step.first_op_id, size)
        return LoopMoment(name, at, count, len(trained))

    size, steady_place, _ = trained[steady]
    alike = sum(abs(each[0] - size) <= ALIKE * size for each in trained.values())
    found = []
    above = {number: each for number, each in trained.items() if each[0] > size * (1 + ALIKE)}
    if above:
        number, count = _first_highest({step: each[0] for step, each in above.items()})
        most, place, of_phase = above[number]
        found.append(moment("optimizer" if of_phase == "optimizer" else _WORST_BATCH, number, place, most, count))
    for phase, peaks in highest.items():
        if phase in _OF_STEPS:
            continue
        number, _ = _first_highest({step: each[0] for step, each in peaks.items()})
        most, place = peaks[number]
        if phase != _BETWEEN or most > max(each[0] for each in trained.values()) * (1 + ALIKE):
            found.append(moment(phase, number, place, most, len(peaks)))
    found.sort(key=lambda each: -each.moment.allocated_bytes)
    return (moment(STEADY, steady, steady_place, size, alike), *found)


def describe_moments(trace: Trace, budget_bytes: int | None = None) -> str:
    """Returns the moments of a whole loop, ``steady 18.20, evaluation 19.90 (step 50) of 22.90 GiB``, and its reach.

    Args:
        trace: The recording; of others than dry runs of whole loops the text is "".
        budget_bytes: A budget to name beside them.
    """
    moments = find_loop_moments(trace)
    if not moments:
        return ""
    sizes = [each.moment.allocated_bytes for each in moments] + ([] if budget_bytes is None else [budget_bytes])
    texts, _, unit = format_bytes_alike(sizes).rpartition(" ")
    figures = texts.split(", ")
    listed = ", ".join(f"{each.name} {size}{each.place}" for each, size in zip(moments, figures, strict=False))
    reach = next(note for note in trace.manifest.notes if note.startswith(WHOLE)).partition(": ")[2].partition(";")[0]
    of = "" if budget_bytes is None else f" of {figures[-1]}"
    return f"{listed}{of} {unit}; {reach}"


def _first_highest(sizes: dict[int, int]) -> tuple[int, int]:
    """Returns the first step whose bytes are the highest but for a scalar more or less, and how many have such."""
    least = max(sizes.values()) * (1 - ALIKE)
    alike = [step for step, size in sizes.items() if size >= least]
    return min(alike), len(alike)


def _named_by_function(sources: Sources, stack_id: int, phase: str) -> str:
    """Returns what the job does in a phase that says little, by its outermost function that says one thing."""
    frames = sources.user_frames[stack_id] if 0 <= stack_id < len(sources.user_frames) else ()
    functions = [frame.function for frame in frames if frame.function != "<module>"]
    for function in reversed(functions):
        words = re.sub("(?<=[a-z])(?=[A-Z])", "_", function).lower().strip("_")
        names = [name for name, pattern in _BY_FUNCTION.items() if pattern.search(words)]
        if len(names) == 1 and names[0]:
            return names[0]
    return phase if phase != _BETWEEN else f"{functions[0]}()" if functions else "between steps"


def _steady(trained: dict[int, tuple[int, int, str]]) -> int:
    """Returns the step whose peak most steps have, of equally many the lower one; the first step counts only alone."""
    sizes = {number: each[0] for number, each in trained.items() if number or len(trained) == 1}
    counts = Counter(sizes.values())
    common = min(counts, key=lambda size: (-counts[size], size))
    return next(number for number, size in sizes.items() if size == common)
