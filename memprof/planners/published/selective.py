"""Drops large values that are cheap to recompute, and keeps the outputs of expensive operators."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.choices import Choices
from memprof.planners.graph.graph import Graph
from memprof.planners.graph.moves import Replay
from memprof.planners.graph.recomputation import Recomputation, idle_between
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.planners.graph.writing import Demand
from memprof.trace.schema import Bools, Ints
from memprof.units import format_bytes

#: Schedules tried over all values, over those at the peak, and for each segment size. With more values, several are
#: dropped at a time.
_MOST_OF_ALL, _MOST_AT_PEAK, _MOST_IN_SEGMENTS = 96, 160, 24
#: Segments are limited to the saved bytes divided by each of these.
_SHARES = (2, 4, 8, 16, 32, 64)


class Selective(Planner):
    """Drops saved values in ascending order of recompute cost per byte, until the step fits.

    The cost is that of all operators that must run again in addition to those already recomputed: everything between a
    value and its kept ancestors, and nothing where that runs again anyway. Three orders are tried: over all values;
    over those live at the peak, which is recomputed after each drop; and over all again, but keeping those that would
    join dropped values into segments above some size, since a segment is live at once when recomputed. None depends on
    the budget, so a larger one is never slower.
    """

    name: ClassVar[str] = "selective"
    source: ClassVar[str] = (
        "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (dropping the results of low-cost "
        "operations); Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models "
        "(section 5, selective activation recomputation)"
    )
    summary: ClassVar[str] = "keeps the outputs of expensive operators and drops those that are large and cheap"

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Drops values one by one and returns the fastest schedule that fits."""
        choices = Choices(task)
        if choices.is_met:
            return choices.met()
        for done, how in _drops(task.graph):
            if choices.is_late():
                break
            choices.add(done, how)
        return choices.found()


def _drops(graph: Graph) -> Iterator[tuple[Replay, str]]:
    demand, saved = Demand(graph), graph.is_saved()
    total = int(graph.value_bytes[saved].sum())

    def many(dropped: Bools) -> str:
        return f"{int((dropped & saved).sum())} of {int(saved.sum())} saved values"

    for dropped in cheapest_first(graph):
        yield replay(graph, demand.schedule(dropped)), f"drops the {many(dropped)} cheapest to recompute"
    for done, dropped in _cheapest_at_peak(graph, demand):
        yield done, f"drops the {many(dropped)} live at the peak and cheapest to recompute"
    for most_bytes in (total // share for share in _SHARES):
        for dropped in cheapest_first(graph, most_bytes, _MOST_IN_SEGMENTS):
            how = f"drops the {many(dropped)} cheapest to recompute, in segments of up to {format_bytes(most_bytes)}"
            yield replay(graph, demand.schedule(dropped)), how


def cheapest_first(graph: Graph, most_together: float = math.inf, most: int = _MOST_OF_ALL) -> Iterator[Bools]:
    """Drops saved values one after the other, lowest recompute cost per byte first.

    Args:
        graph: The step.
        most_together: Most bytes that may be recomputed at once; a value that would exceed this is kept.
        most: Approximate maximum number of results; with more values, several are dropped between two.

    Yields:
        Which values are dropped, shape ``(values,)``.
    """
    candidates = np.flatnonzero(graph.is_saved())
    order = _Order(graph)
    order.start(candidates.tolist())
    portion = graph.value_bytes[candidates].sum() / most if len(candidates) > most else 0
    since = 0
    while (value := order.pop()) is not None:
        if order.remaking.together_bytes(value) > most_together:
            continue
        order.drop(value)
        since += int(graph.value_bytes[value])
        if since >= portion:
            since = 0
            yield order.remaking.dropped.copy()
    if since:
        yield order.remaking.dropped.copy()


def _cheapest_at_peak(graph: Graph, demand: Demand) -> Iterator[tuple[Replay, Bools]]:
    """Drops the cheapest value that is live and idle at the peak, and recomputes the peak."""
    saved, (last, first) = graph.is_saved(), idle_between(graph)
    portion = graph.value_bytes[saved].sum() / _MOST_AT_PEAK if saved.sum() > _MOST_AT_PEAK else 0
    order = _Order(graph)
    dropped = order.remaking.dropped
    done = replay(graph, as_recorded(graph))
    while True:
        peak = int(done.during_bytes.argmax())
        before, after = around(done, peak, peak)
        candidates = np.flatnonzero(saved & ~dropped & (last <= before) & (first >= after))
        order.start(candidates.tolist())
        since = 0
        while (since == 0 or since < portion) and (value := order.pop()) is not None:
            order.drop(value)
            since += int(graph.value_bytes[value])
        if not since:
            return
        done = replay(graph, demand.schedule(dropped))
        yield done, dropped


def around(done: Replay, first_run: int, last_run: int) -> tuple[int, int]:
    """Returns the operators of the step around some runs; a value away from one to the other is not live during them.

    Returns:
        The last of the step's own runs before them, -1 for none, and the first after them.
    """
    own = done.runs[~done.is_again]
    before = int((~done.is_again[:first_run]).sum())
    after = int((~done.is_again[: last_run + 1]).sum())
    return (int(own[before - 1]) if before else -1), (int(own[after]) if after < len(own) else len(own))


class _Order:
    """Values ordered by recompute cost per byte, while values are dropped."""

    def __init__(self, graph: Graph) -> None:
        self.remaking = Recomputation(graph)
        self._bytes: Ints = np.maximum(graph.value_bytes, 1)
        # Valid until dropping another value changes it.
        self._ratio: dict[int, float] = {}
        self._waiting: set[int] = set()
        self._heap: list[tuple[float, int]] = []

    def start(self, values: Iterable[int]) -> None:
        """Queues some values, replacing the queue."""
        self._waiting = set(values)
        self._heap = [(self._ratio_of(value), value) for value in self._waiting]
        heapq.heapify(self._heap)

    def pop(self) -> int | None:
        """Removes and returns the cheapest; None if empty."""
        while self._heap:
            ratio, value = heapq.heappop(self._heap)
            if value in self._waiting and self._ratio[value] == ratio:
                self._waiting.remove(value)
                return value
        return None

    def drop(self, value: int) -> None:
        """Drops a removed value, and requeues those whose cost it changes."""
        for other in sorted(self.remaking.drop(value)):
            self._ratio.pop(other, None)
            if other in self._waiting:
                heapq.heappush(self._heap, (self._ratio_of(other), other))

    def _ratio_of(self, value: int) -> float:
        if value not in self._ratio:
            self._ratio[value] = self.remaking.added_us(value) / float(self._bytes[value])
        return self._ratio[value]
