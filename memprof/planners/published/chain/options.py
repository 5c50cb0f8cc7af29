"""What one stage of a chain can keep for its backward, and what each choice costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.stages import Line, Stage
from memprof.planners.published.chain.rehearsal import Rehearsal, backward_items
from memprof.trace.schema import NONE

#: Up to so many saved values, every choice among them is weighed; above, values are let go one by one, the cheapest
#: for its bytes first; above the second, in the order of what each costs alone.
_MOST_FOR_ALL_CHOICES = 6
_MOST_FOR_STEPS = 24

#: Layers that are the same otherwise may take so many times as long as one another.
_NOISE = 1.3


@dataclass(frozen=True)
class Option:
    """A choice of values kept from forward to backward.

    Attributes:
        kept: Positions in ``stage.values``.
        held_bytes: Those and what the stage passes on.
        first_peak: Highest bytes of the stage's first forward, above what was alive beside it when it began.
        forward_us: Time of going through the stage once more and keeping these.
        forward_peak: Highest bytes of that, beside everything else.
        backward_us: Time of what backward makes again.
        backward_peak: Highest bytes of the stage's backward, above what was alive beside it when it began.
    """

    kept: tuple[int, ...]
    held_bytes: int
    first_peak: int
    forward_us: float
    forward_peak: int
    backward_us: float
    backward_peak: int


@dataclass(frozen=True)
class StageCosts:
    """A stage in numbers.

    Attributes:
        options: What it can keep, none of them worse than another in everything.
        pass_us: Time of going through it once more for nothing but what it passes on.
        pass_peak: Highest bytes of that, its inputs left out.
        pass_on_peak: The same, its inputs counted until their last read.
        first_pass_peak: Highest bytes of its first forward when it keeps nothing, above what was alive beside it.
        first_pass_on_peak: The same, its inputs counted until their last read.
        output_bytes: Bytes it passes on.
    """

    options: tuple[Option, ...]
    pass_us: float
    pass_peak: int
    pass_on_peak: int
    first_pass_peak: int
    first_pass_on_peak: int
    output_bytes: int


def stage_costs(graph: Graph, line: Line, is_late: Callable[[], bool] = lambda: False) -> list[StageCosts]:
    """Weighs the options of every stage; stages that differ in nothing but noise in time are weighed once.

    Source: Beaumont et al. 2020 (Optimal checkpointing for heterogeneous chains), section 3, for the numbers; Zhao et
    al. 2023 (Rockmate), section 4, for solving inside of a stage for several budgets.

    Raises:
        TimeoutError: ``is_late`` said that time is up.
    """
    reads, made = graph.reads_by_op(), graph.values_by_op()
    alike: dict[tuple[object, ...], list[int]] = {}
    for row, stage in enumerate(line.stages):
        alike.setdefault(_signature(graph, line, stage, reads, made), []).append(row)
    costs: dict[int, StageCosts] = {}
    for rows in (part for group in alike.values() for part in _of_like_time(graph, line, group)):
        stages = [line.stages[row] for row in rows]
        times = np.mean([graph.cost_us[stage.first_op : stage.end_op] for stage in stages], axis=0)
        rehearsal = Rehearsal(graph, line, stages[0], times.tolist(), reads, made)
        weighed = _Weighing(stages[0], rehearsal, is_late).costs()
        costs.update(dict.fromkeys(rows, weighed))
    return [costs[row] for row in range(len(line.stages))]


def _of_like_time(graph: Graph, line: Line, rows: list[int]) -> list[list[int]]:
    """Splits stages so that those of one part differ in time by noise alone."""
    total = {row: float(graph.cost_us[line.stages[row].first_op : line.stages[row].end_op].sum()) for row in rows}
    parts: list[list[int]] = []
    for row in sorted(rows, key=total.__getitem__):
        if not parts or total[row] > total[parts[-1][0]] * _NOISE:
            parts.append([])
        parts[-1].append(row)
    return parts


def _signature(
    graph: Graph, line: Line, stage: Stage, reads: list[list[int]], made: list[list[int]]
) -> tuple[object, ...]:
    """Returns what two stages have in common if they are the same but for time."""
    place = {value: number for number, value in enumerate((*stage.inputs, *stage.values))}
    start = line.bytes_before(stage.first_op)
    forward = tuple(
        (
            int(graph.workspace_bytes[op_id]),
            int(line.base_bytes[op_id]) - start,
            tuple(sorted(place.get(value, NONE) for value in reads[op_id])),
            tuple(sorted(place.get(value, NONE) for value in made[op_id])),
        )
        for op_id in range(stage.first_op, stage.end_op)
    )
    sizes = tuple((int(graph.value_bytes[value]), int(graph.taken_from[value] == NONE)) for value in place)
    backward = tuple(backward_items(graph, line, stage, reads))
    late = tuple(
        (op_id - stage.backward_op, tuple(sorted(place[value] for value in reads[op_id] if value in place)))
        for op_id, _ in backward
        if op_id != NONE
    )
    return forward, sizes, late, tuple(extra for _, extra in backward), len(stage.inputs), len(stage.outputs)


class _Weighing:
    """Puts the choices of one stage into numbers."""

    def __init__(self, stage: Stage, rehearsal: Rehearsal, is_late: Callable[[], bool]) -> None:
        self._stage, self._rehearsal, self._is_late = stage, rehearsal, is_late

    def costs(self) -> StageCosts:
        """Weighs going through without keeping anything, and every option."""
        rehearsal = self._rehearsal
        inputs, outputs = set(self._stage.inputs), set(self._stage.outputs)
        again = rehearsal.making(outputs, set())
        return StageCosts(
            options=tuple(_undominated(self._options())),
            pass_us=rehearsal.time_of(again),
            pass_peak=rehearsal.peak(again, set(), outputs),
            pass_on_peak=rehearsal.peak(again, inputs, outputs, with_inputs=True),
            first_pass_peak=rehearsal.peak(rehearsal.first, set(), outputs),
            first_pass_on_peak=rehearsal.peak(rehearsal.first, inputs, outputs, with_inputs=True),
            output_bytes=rehearsal.size_of(outputs),
        )

    def _options(self) -> list[Option]:
        late = self._rehearsal.late
        if len(late) <= _MOST_FOR_ALL_CHOICES:
            return [self._option(kept) for size in range(len(late) + 1) for kept in combinations(late, size)]
        found = [self._option(late)]
        if len(late) > _MOST_FOR_STEPS:
            alone = {value: self._worth(found[0], [v for v in late if v != value]) for value in late}
            order = sorted(late, key=lambda value: alone[value][0])
            return found + [self._option(order[count:]) for count in range(1, len(order) + 1)]
        kept = late
        while kept:
            tries = [self._worth(found[-1], [v for v in kept if v != value]) for value in kept]
            _, best = min(tries, key=lambda pair: pair[0])
            found.append(best)
            kept = [self._stage.values[place] for place in best.kept]
        return found

    def _worth(self, more: Option, kept: list[int]) -> tuple[float, Option]:
        """Returns what a byte costs that an option holds less than another, and the option."""
        option = self._option(kept)
        saved = more.held_bytes - option.held_bytes
        return (option.backward_us - more.backward_us) / max(saved, 1), option

    def _option(self, kept: Iterable[int]) -> Option:
        if self._is_late():
            raise TimeoutError
        held = set(kept)
        passed = held | set(self._stage.outputs)
        rehearsal = self._rehearsal
        again = rehearsal.making(passed, set())
        backward, spent_us = rehearsal.backward(held)
        return Option(
            kept=tuple(place for place, value in enumerate(self._stage.values) if value in held),
            held_bytes=rehearsal.size_of(passed),
            first_peak=rehearsal.peak(rehearsal.first, set(), passed),
            forward_us=rehearsal.time_of(again),
            forward_peak=rehearsal.peak(again, set(), passed),
            backward_us=spent_us,
            backward_peak=rehearsal.peak(backward, held, set()),
        )


def _undominated(options: list[Option]) -> list[Option]:
    """Leaves out options that are no better than another in anything."""
    best: list[Option] = []
    for option in sorted(options, key=lambda one: (one.held_bytes, one.backward_us, one.forward_us)):
        numbers = _numbers(option)
        if not any(all(a <= b for a, b in zip(_numbers(other), numbers, strict=True)) for other in best):
            best.append(option)
    return best


def _numbers(option: Option) -> tuple[float, ...]:
    return (
        option.held_bytes,
        option.backward_us,
        option.forward_us + option.backward_us,
        option.first_peak,
        option.forward_peak,
        option.backward_peak,
    )
