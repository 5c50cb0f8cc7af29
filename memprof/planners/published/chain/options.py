"""What one stage of a chain can keep for its backward, and the cost of each choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.stages import Line, Stage
from memprof.planners.published.chain.rehearsal import Rehearsal, backward_items
from memprof.trace.schema import NONE

#: Up to this many saved values, all subsets are evaluated; above, values are dropped one by one, the cheapest per byte
#: first; above the second number, in order of each one's cost alone.
_MOST_FOR_ALL_CHOICES = 6
_MOST_FOR_STEPS = 24

#: Otherwise identical layers may differ in time by up to this factor.
_NOISE = 1.3


@dataclass(frozen=True)
class Option:
    """A choice of values kept from forward to backward.

    Attributes:
        kept: Positions in ``stage.values``.
        held_bytes: Bytes of those values and of the stage's outputs.
        first_peak: Peak of the stage's first forward, above the other live bytes when it began.
        forward_us: Time to rerun the stage's forward and keep these values.
        forward_peak: Peak of that rerun, above other live bytes.
        backward_us: Time of the recompute during backward.
        backward_peak: Peak of the stage's backward, above the other live bytes when it began.
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
    """Costs of one stage.

    Attributes:
        options: What it can keep; Pareto-optimal choices only.
        pass_us: Time to rerun its forward and keep only its outputs.
        pass_peak: Peak of that rerun, inputs excluded.
        pass_on_peak: The same, inputs counted until their last read.
        first_pass_peak: Peak of its first forward when it keeps nothing, above the other live bytes.
        first_pass_on_peak: The same, inputs counted until their last read.
        output_bytes: Bytes of its outputs.
    """

    options: tuple[Option, ...]
    pass_us: float
    pass_peak: int
    pass_on_peak: int
    first_pass_peak: int
    first_pass_on_peak: int
    output_bytes: int


def stage_costs(graph: Graph, line: Line, is_late: Callable[[], bool] = lambda: False) -> list[StageCosts]:
    """Computes the options of every stage; stages that differ only by timing noise are computed once.

    Source: Beaumont et al. 2020 (Optimal checkpointing for heterogeneous chains), section 3, for the numbers; Zhao et
    al. 2023 (Rockmate), section 4, for solving within a stage for several budgets.

    Raises:
        TimeoutError: ``is_late`` returned True.
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
    """Splits stages into groups whose times differ only by noise."""
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
    """Computes the costs of the choices of one stage."""

    def __init__(self, stage: Stage, rehearsal: Rehearsal, is_late: Callable[[], bool]) -> None:
        self._stage, self._rehearsal, self._is_late = stage, rehearsal, is_late

    def costs(self) -> StageCosts:
        """Computes the cost of keeping nothing, and of every option."""
        rehearsal = self._rehearsal
        inputs, outputs = set(self._stage.inputs), set(self._stage.outputs)
        again = rehearsal.making(outputs, set(inputs))  # an output may be an input that a later stage reads, too
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
        """Returns the extra time per byte saved of an option relative to another, and the option."""
        option = self._option(kept)
        saved = more.held_bytes - option.held_bytes
        return (option.backward_us - more.backward_us) / max(saved, 1), option

    def _option(self, kept: Iterable[int]) -> Option:
        if self._is_late():
            raise TimeoutError
        held = set(kept)
        passed = held | set(self._stage.outputs)
        rehearsal = self._rehearsal
        again = rehearsal.making(passed, set(self._stage.inputs))
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
    """Removes dominated options."""
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
