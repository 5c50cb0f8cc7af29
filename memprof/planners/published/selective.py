"""Drops what is large and cheap to make again, and keeps the outputs of expensive operators."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.choices import Choices
from memprof.planners.graph.demand import Demand
from memprof.planners.graph.graph import Graph
from memprof.planners.graph.recomputation import Recomputation, idle_between
from memprof.planners.graph.replay import Replay
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.trace.schema import Bools, Ints
from memprof.units import format_bytes

#: Schedules tried over all values, over those at the peak, and for each size of segments. Where there are more values,
#: several are dropped at a time.
_MOST_OF_ALL, _MOST_AT_PEAK, _MOST_IN_SEGMENTS = 96, 160, 24
#: Segments are held to the saved bytes divided by each of these.
_SHARES = (2, 4, 8, 16, 32, 64)


class Selective(Planner):
    """Drops saved values in the order of what making them again costs for each byte, until the step fits.

    The cost is that of all operators that must run again beyond those that do for what is dropped already: everything
    between a value and what is kept before it, and nothing where that runs again anyway. Three ways are tried: over
    all values; over those alive at the peak, which is looked for anew each time; and over all again, but keeping those
    that would join what is dropped to segments of more than some bytes, for these are alive at once when they are made
    again. All go on whatever the budget is, so a larger one is never slower.
    """

    name: ClassVar[str] = "selective"
    source: ClassVar[str] = (
        "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (dropping the results of low-cost "
        "operations); Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models "
        "(section 5, selective activation recomputation)"
    )
    summary: ClassVar[str] = "keeps the outputs of expensive operators and drops those that are large and cheap"

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Drops values one by one and takes the fastest schedule that fits."""
        choices = Choices(task)
        if choices.is_met:
            return choices.met()
        for done, how in _drops(task.graph):
            if choices.is_late():
                break
            choices.add(done, how)
        return choices.found()


def _drops(graph: Graph) -> Iterator[tuple[Replay, str]]:
    """Drops saved values in every way that is tried; yields schedules, replayed, and what they are."""
    demand, saved = Demand(graph), graph.is_saved()
    total = int(graph.value_bytes[saved].sum())

    def many(dropped: Bools) -> str:
        return f"{int((dropped & saved).sum())} of {int(saved.sum())} saved values"

    for dropped in cheapest_first(graph):
        yield replay(graph, demand.schedule(dropped)), f"drops the {many(dropped)} cheapest to make again"
    for done, dropped in _cheapest_at_peak(graph, demand):
        yield done, f"drops the {many(dropped)} that are cheapest to make again of those alive at the peak"
    for most_bytes in (total // share for share in _SHARES):
        for dropped in cheapest_first(graph, most_bytes, _MOST_IN_SEGMENTS):
            how = f"drops the {many(dropped)} cheapest to make again in segments of up to {format_bytes(most_bytes)}"
            yield replay(graph, demand.schedule(dropped)), how


def cheapest_first(graph: Graph, most_together: float = math.inf, most: int = _MOST_OF_ALL) -> Iterator[Bools]:
    """Drops one saved value after the other, the cheapest to make again for each byte first.

    Args:
        graph: The step.
        most_together: Most bytes that may be made again at once; a value that would bring together more stays.
        most: How often it yields about at most; where there are more values, several are dropped in between.

    Yields:
        What is dropped, shape ``(values,)``.
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
    """Drops the cheapest of what is alive at the peak and idle there, and looks for the peak anew."""
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
    """Returns the operators of the step between which some runs lie: what is away from one to the other is not there.

    Returns:
        The last of the step's own runs before them, -1 where there is none, and the first after them.
    """
    own = done.runs[~done.is_again]
    before = int((~done.is_again[:first_run]).sum())
    after = int((~done.is_again[: last_run + 1]).sum())
    return (int(own[before - 1]) if before else -1), (int(own[after]) if after < len(own) else len(own))


class _Order:
    """Values in the order of what making them again costs for each byte, while values are dropped."""

    def __init__(self, graph: Graph) -> None:
        self.remaking = Recomputation(graph)
        self._bytes: Ints = np.maximum(graph.value_bytes, 1)
        # Known until dropping another value changes it.
        self._ratio: dict[int, float] = {}
        self._waiting: set[int] = set()
        self._heap: list[tuple[float, int]] = []

    def start(self, values: Iterable[int]) -> None:
        """Puts some values in order, and no others."""
        self._waiting = set(values)
        self._heap = [(self._ratio_of(value), value) for value in self._waiting]
        heapq.heapify(self._heap)

    def pop(self) -> int | None:
        """Takes out the cheapest; None where there is none left."""
        while self._heap:
            ratio, value = heapq.heappop(self._heap)
            if value in self._waiting and self._ratio[value] == ratio:
                self._waiting.remove(value)
                return value
        return None

    def drop(self, value: int) -> None:
        """Drops a value that was taken out, and puts those in order whose cost it changes."""
        for other in sorted(self.remaking.drop(value)):
            self._ratio.pop(other, None)
            if other in self._waiting:
                heapq.heappush(self._heap, (self._ratio_of(other), other))

    def _ratio_of(self, value: int) -> float:
        if value not in self._ratio:
            self._ratio[value] = self.remaking.added_us(value) / float(self._bytes[value])
        return self._ratio[value]
