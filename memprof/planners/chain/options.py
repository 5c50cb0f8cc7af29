"""What one stage of a chain can keep for its backward, and what each choice costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from memprof.planners.graph import Graph
from memprof.planners.stages import Line, Stage
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


def stage_costs(graph: Graph, line: Line) -> list[StageCosts]:
    """Weighs the options of every stage; stages that differ in nothing but noise in time are weighed once.

    Source: Beaumont et al. 2020 (Optimal checkpointing for heterogeneous chains), section 3, for the numbers; Zhao et
    al. 2023 (Rockmate), section 4, for solving inside of a stage for several budgets.
    """
    reads, made = graph.reads_by_op(), graph.values_by_op()
    alike: dict[tuple[object, ...], list[int]] = {}
    for row, stage in enumerate(line.stages):
        alike.setdefault(_signature(graph, line, stage, reads, made), []).append(row)
    costs: dict[int, StageCosts] = {}
    for rows in (part for group in alike.values() for part in _of_like_time(graph, line, group)):
        stages = [line.stages[row] for row in rows]
        times = np.mean([graph.cost_us[stage.first_op : stage.end_op] for stage in stages], axis=0)
        weighed = _Rehearsal(graph, line, stages[0], times.tolist(), reads, made).costs()
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
    backward = tuple(_backward_items(graph, line, stage, reads))
    late = tuple(
        (op_id - stage.backward_op, tuple(sorted(place[value] for value in reads[op_id] if value in place)))
        for op_id, _ in backward
        if op_id != NONE
    )
    return forward, sizes, late, tuple(extra for _, extra in backward), len(stage.inputs), len(stage.outputs)


def _backward_items(graph: Graph, line: Line, stage: Stage, reads: list[list[int]]) -> list[tuple[int, int]]:
    """Lists a stage's backward: operators that read its values, and between them the highest of what else is alive."""
    start, tracked = line.bytes_before(stage.backward_op), set(stage.values)
    items: list[tuple[int, int]] = []
    busy = line.base_bytes + graph.workspace_bytes
    at = stage.backward_op
    for op_id in range(stage.backward_op, stage.backward_end_op):
        if tracked.isdisjoint(reads[op_id]):
            continue
        if op_id > at:
            items.append((NONE, int(busy[at:op_id].max()) - start))
        items.append((op_id, int(busy[op_id]) - start))
        at = op_id + 1
    if stage.backward_end_op > at:
        items.append((NONE, int(busy[at : stage.backward_end_op].max()) - start))
    return items


class _Rehearsal:
    """Plays one stage alone."""

    def __init__(
        self,
        graph: Graph,
        line: Line,
        stage: Stage,
        times: list[float],
        reads: list[list[int]],
        made: list[list[int]],
    ) -> None:
        self._line, self._stage, self._times = line, stage, times
        self._size, self._taken = graph.value_bytes.tolist(), graph.taken_from.tolist()
        self._maker, self._workspace = graph.value_op.tolist(), graph.workspace_bytes.tolist()
        self._reads, self._made = reads, made
        self._tracked = frozenset(stage.values)
        self._backward = _backward_items(graph, line, stage, reads)
        start = line.bytes_before(stage.first_op)
        self._first = [
            (op_id, int(line.base_bytes[op_id] + graph.workspace_bytes[op_id]) - start)
            for op_id in range(stage.first_op, stage.end_op)
        ]

    def costs(self) -> StageCosts:
        """Weighs going through without keeping anything, and every option."""
        outputs = set(self._stage.outputs)
        again = self._making(outputs, set())
        with_inputs = self._tracked | set(self._stage.inputs)
        inputs = set(self._stage.inputs)
        return StageCosts(
            options=tuple(_undominated(self._options())),
            pass_us=self._time(again),
            pass_peak=self._peak(again, set(), outputs, self._tracked),
            pass_on_peak=self._peak(again, inputs, outputs, with_inputs),
            first_pass_peak=self._peak(self._first, set(), outputs, self._tracked),
            first_pass_on_peak=self._peak(self._first, inputs, outputs, with_inputs),
            output_bytes=sum(self._size[value] for value in outputs),
        )

    def _options(self) -> list[Option]:
        late = sorted({v for op_id, _ in self._backward if op_id != NONE for v in self._reads[op_id]} & self._tracked)
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
        held = set(kept)
        passed = held | set(self._stage.outputs)
        again = self._making(passed, set())
        alive = set(held)
        backward: list[tuple[int, int]] = []
        spent = 0.0
        for op_id, extra in self._backward:
            if op_id != NONE:
                missing = {value for value in self._reads[op_id] if value in self._tracked and value not in alive}
                above = self._line.bytes_before(op_id) - self._line.bytes_before(self._stage.backward_op)
                made = self._making(missing, alive) if missing else []
                spent += self._time(made)
                backward += [(other, busy + above) for other, busy in made]
            backward.append((op_id, extra))
        return Option(
            kept=tuple(place for place, value in enumerate(self._stage.values) if value in held),
            held_bytes=sum(self._size[value] for value in passed),
            first_peak=self._peak(self._first, set(), passed, self._tracked),
            forward_us=self._time(again),
            forward_peak=self._peak(again, set(), passed, self._tracked),
            backward_us=spent,
            backward_peak=self._peak(backward, held, set(), self._tracked),
        )

    def _making(self, wanted: set[int], alive: set[int]) -> list[tuple[int, int]]:
        """Lists the operators that make values, with their workspace; adds to ``alive`` what they leave."""
        items: list[tuple[int, int]] = []
        for value in sorted(wanted):
            stack = [] if value in alive else [self._maker[value]]
            while stack:
                op_id = stack[-1]
                missing = [v for v in self._reads[op_id] if v in self._tracked and v not in alive]
                if missing:
                    stack.extend(self._maker[v] for v in reversed(missing))
                    continue
                stack.pop()
                if all(v in alive for v in self._made[op_id]):
                    continue
                items.append((op_id, self._workspace[op_id]))
                alive.update(self._made[op_id])
                alive.difference_update(self._taken[v] for v in self._made[op_id])
        return items

    def _time(self, items: list[tuple[int, int]]) -> float:
        return sum(self._times[op_id - self._stage.first_op] for op_id, _ in items)

    def _peak(self, items: list[tuple[int, int]], start: set[int], end: set[int], tracked: frozenset[int]) -> int:
        """Replays a few operators: values live from their making to their last read, or to the end."""
        count = len(items)
        change = [0] * (count + 1)
        size, taken = self._size, self._taken
        open_since = {value: (0, 0) for value in start if value in tracked}

        def close(value: int, last: int) -> None:
            born, _ = open_since.pop(value)
            if last >= born:
                change[born] += size[value]
                change[min(last + 1, count)] -= size[value]

        for at, (op_id, _) in enumerate(items):
            if op_id == NONE:
                continue
            for value in self._reads[op_id]:
                if value in open_since:
                    open_since[value] = (open_since[value][0], at)
            for value in self._made[op_id]:
                if value not in tracked:
                    continue
                if value in open_since:
                    close(value, open_since[value][1])
                if taken[value] in open_since:
                    close(taken[value], at - 1)
                open_since[value] = (at, at)
        for value in list(open_since):
            close(value, count - 1 if value in end else open_since[value][1])
        alive, peak = 0, 0
        for at, (_, extra) in enumerate(items):
            alive += change[at]
            peak = max(peak, alive + extra)
        return peak


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
