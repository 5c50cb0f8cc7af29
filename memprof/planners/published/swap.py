"""Offloads idle values to host memory while the copies overlap; then the cheaper of exposed copies and recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.choices import Choices
from memprof.planners.graph.graph import Graph
from memprof.planners.graph.moves import Absence, Windows, needed_runs, waits_us
from memprof.planners.graph.recomputation import Recomputation, idle_between
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.planners.graph.writing import Demand
from memprof.planners.published.selective import around, cheapest_first
from memprof.trace.schema import Ints
from memprof.units import format_bytes, format_us

#: Cheapest candidates whose exposed copies are simulated before one is chosen; and candidates with hidden copies that
#: are rejected because they would still be in flight at the peak, before the search gives up.
_MOST_SIMULATED, _MOST_ON_THE_WAY = 5, 8
#: Schedules tried each time; with more values, several are moved at once.
_MOST_TRIED, _MOST_TRIED_IN_SEGMENTS = 240, 60
#: Segments in which values are dropped at the start are limited to the saved bytes divided by each of these.
_SHARES = (2, 4, 8, 16, 32)


class SwapOut(Planner):
    """Offloads values in Capuchin's order, and recomputes those for which that is cheaper.

    Repeatedly finds the peak. Of the values idle there, the one with the most slack is moved, as long as its copies are
    hidden; after that, whatever costs least per byte: exposed copies, or recompute. This does not depend on the budget,
    and is repeated from other starting points where some values are already dropped, so a larger budget is never
    slower.
    """

    name: ClassVar[str] = "swap"
    source: ClassVar[str] = (
        "Peng et al. 2020, Capuchin: Tensor-based GPU Memory Management for Deep Learning, design of the policy maker "
        "(swap by free time while it hides, then the cheaper of swap and recomputation)"
    )
    summary: ClassVar[str] = "offloads idle values to host memory, and recomputes those for which that is cheaper"

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Moves or drops values one by one and returns the fastest schedule that fits."""
        choices = Choices(task)
        if choices.is_met:
            return choices.met()
        if task.link_bytes_per_us <= 0:
            return ScheduleResult(
                "nothing found",
                "Unknown bandwidth between device and host memory, so nothing can be offloaded.",
                least_bytes=choices.recorded_bytes,
            )
        for state, most_tried in _starts(task):
            for _ in range(most_tried):
                choices.add(state.done, state.describe(), state.moves)
                if choices.is_late():
                    return choices.found()
                if not state.advance():
                    break
        return choices.found()


def _starts(task: ScheduleRequest) -> Iterator[tuple[_State, int]]:
    """Yields the starting points of the search, with the number of schedules tried from each.

    The first is the recorded step. Values dropped on the way cost memory later, where they are recomputed: so the
    others are its result with copies only, and what recompute alone would drop in short segments.
    """
    graph, saved = task.graph, task.graph.is_saved()
    first = _State(task, _MOST_TRIED)
    yield first, _MOST_TRIED
    if first.has_dropped:
        yield _State(task, _MOST_TRIED, may_drop=False), _MOST_TRIED
    total = int(graph.value_bytes[saved].sum())
    for share in _SHARES:
        for dropped in cheapest_first(graph, total // share, most=1):
            values = np.flatnonzero(dropped & saved).tolist()
            yield _State(task, _MOST_TRIED_IN_SEGMENTS, dropped=values), _MOST_TRIED_IN_SEGMENTS


class _State:
    """Values moved and dropped so far, and the resulting schedule."""

    def __init__(
        self, task: ScheduleRequest, most_tried: int, *, may_drop: bool = True, dropped: Sequence[int] = ()
    ) -> None:
        self._may_drop = may_drop
        self._graph = task.graph
        self._link = task.link_bytes_per_us
        self._demand = Demand(task.graph)
        self._remaking = Recomputation(task.graph)
        self._saved = task.graph.is_saved()
        self._idle = idle_between(task.graph)
        self._gaps = _gaps(task.graph)
        # Recompute cost of each value, invalidated when dropping another changes it.
        self._remake_us: dict[int, float] = {}
        sizes = task.graph.value_bytes[self._saved]
        self._portion = int(sizes.sum()) // (most_tried // 2) if len(sizes) > most_tried // 2 else 0
        self._absences: dict[tuple[int, int], Absence] = {}
        # A copy that was not hidden once will not be hidden when more are in flight.
        self._cannot_hide: set[tuple[int, int]] = set()
        for value in dropped:
            self._remaking.drop(value)
        self._dropped_count = len(dropped)
        self.runs: Ints = as_recorded(task.graph)
        self._rebuild(is_new_schedule=True)

    def advance(self) -> bool:
        """Removes the best candidate from the peak; returns whether there was one."""
        before, after = around(self.done, self._peak, self._peak)
        value, leave, until = self._gaps
        rows = np.flatnonzero((leave <= before) & (until >= after) & ~self._remaking.dropped[value])
        spare_us = self._windows.idle_us(value[rows], leave[rows])
        order = np.argsort(-spare_us, kind="stable")
        gaps = list(zip(value[rows[order]].tolist(), leave[rows[order]].tolist(), strict=True))
        if self._hide(gaps[: int((spare_us >= 0).sum())]):
            self._rebuild(is_new_schedule=False)
            return True
        exposed, exposed_ratio = self._cheapest_exposed(gaps)
        remade, remade_ratio = self._cheapest_remade(before, after) if self._may_drop else ([], np.inf)
        if exposed is not None and exposed_ratio <= remade_ratio:
            self._absences[exposed.value, exposed.leave_op] = exposed
            self._rebuild(is_new_schedule=False)
            return True
        if not remade:
            return False
        for number in remade:
            for stale in (number, *self._remaking.drop(number)):
                self._remake_us.pop(stale, None)
        self._absences = {gap: away for gap, away in self._absences.items() if away.value not in remade}
        self._dropped_count += len(remade)
        self._rebuild(is_new_schedule=True)
        return True

    @property
    def has_dropped(self) -> bool:
        """Whether anything is recomputed."""
        return self._dropped_count > 0

    def describe(self) -> str:
        """Describes the schedule in a clause."""
        dropped = f"drops {self._dropped_count} of {int(self._saved.sum())} saved values"
        if not len(self.moves):
            return f"{dropped} and moves none"
        size = format_bytes(int(self._graph.value_bytes[self.moves.value].sum()))
        stall = self.done.stall_us
        waits = f"with {format_us(stall)} of exposed copies" if stall > 0 else "whose copies are hidden"
        drops = f", and {dropped}" if self.has_dropped else ""
        return f"moves {len(self.moves)} values of {size} to host memory, {waits}{drops}"

    def _rebuild(self, *, is_new_schedule: bool) -> None:
        graph = self._graph
        if is_new_schedule:
            if self._dropped_count:
                self.runs = self._demand.schedule(self._remaking.dropped)
            self._alone = replay(graph, self.runs)
        absences = list(self._absences.values())
        self._windows = Windows(graph, self._alone, self._link)
        placed = self._windows.place(absences)
        waits = waits_us(
            placed.moves, needed_runs(self._alone, placed.moves), graph.value_bytes, graph.cost_us[self.runs]
        )
        if waits.any():
            # While the step waits for one copy the others proceed, so they need fewer of its runs.
            self._windows = Windows(graph, self._alone, self._link, waits)
            placed = self._windows.place(absences)
        self._late = int((~placed.is_hidden).sum())
        self.moves = placed.moves
        self.done = replay(graph, self.runs, self.moves)
        self._peak = int(self.done.during_bytes.argmax())
        is_away = (placed.gone_run < self._peak) & (self._peak < placed.back_run)
        self._is_away_at_peak = dict(zip(self._absences, is_away.tolist(), strict=True))

    def _hide(self, gaps: Sequence[tuple[int, int]]) -> bool:
        """Moves the first idle value whose copies are hidden, or the first few where there are many values."""
        taken = on_the_way = 0
        for gap in gaps:
            if gap in self._absences or gap in self._cannot_hide:
                continue
            away = Absence(*gap, gone_op=self._graph.ops)
            placed = self._windows.place([*self._absences.values(), away])
            if (~placed.is_hidden).sum() > self._late:
                self._cannot_hide.add(gap)
            elif placed.gone_run[-1] < self._peak < placed.back_run[-1]:
                self._absences[gap] = away
                taken += int(self._graph.value_bytes[gap[0]])
                if taken >= self._portion:
                    break
            else:
                on_the_way += 1
                if on_the_way == _MOST_ON_THE_WAY:
                    break
        return taken > 0

    def _around_peak(self, size_bytes: int) -> tuple[int, int]:
        """Returns the operators between which a value must be away to lower the peak by its size."""
        is_low = self.done.during_bytes <= self.done.peak_bytes - size_bytes
        left, right = np.flatnonzero(is_low[: self._peak]), np.flatnonzero(is_low[self._peak :])
        first_run = int(left[-1]) + 1 if len(left) else 0
        last_run = self._peak + int(right[0]) - 1 if len(right) else len(is_low) - 1
        return around(self.done, first_run, last_run)

    def _cheapest_exposed(self, gaps: Sequence[tuple[int, int]]) -> tuple[Absence | None, float]:
        """Finds the idle value with the least exposed copy time per byte among those gone at the peak."""
        best, best_ratio, in_vain, simulated = None, np.inf, 0, 0
        for gap in gaps:
            if self._is_away_at_peak.get(gap):
                continue
            before, after = self._around_peak(int(self._graph.value_bytes[gap[0]]))
            away = self._absences.get(gap, Absence(*gap, gone_op=self._graph.ops))
            away = replace(away, gone_op=min(away.gone_op, max(before, gap[1])), back_op=max(away.back_op, after))
            absences = {**self._absences, gap: away}
            placed = self._windows.place(list(absences.values()))
            place = list(absences).index(gap)
            if placed.gone_run[place] < self._peak < placed.back_run[place]:
                waits = replay(self._graph, self.runs, placed.moves).stall_us - self.done.stall_us
                ratio = max(waits, 0.0) / float(self._graph.value_bytes[gap[0]])
                if ratio < best_ratio:
                    best, best_ratio = away, ratio
                simulated += 1
            else:
                in_vain += 1
            if simulated == _MOST_SIMULATED or in_vain == _MOST_ON_THE_WAY or best_ratio == 0:
                break
        return best, best_ratio

    def _cheapest_remade(self, before: int, after: int) -> tuple[list[int], float]:
        """Finds the idle value that is cheapest to recompute per byte, or a few where there are many."""
        last, first = self._idle
        is_there = self._saved & ~self._remaking.dropped & (last <= before) & (first >= after)
        # A value that is moved but in flight at the peak may be recomputed instead.
        is_there[[value for (value, _), is_away in self._is_away_at_peak.items() if is_away]] = False
        ratios = []
        for value in np.flatnonzero(is_there).tolist():
            if value not in self._remake_us:
                self._remake_us[value] = self._remaking.added_us(value)
            ratios.append((self._remake_us[value] / float(self._graph.value_bytes[value]), value))
        ratios.sort()
        chosen, taken = [], 0
        for _, value in ratios:
            chosen.append(value)
            taken += int(self._graph.value_bytes[value])
            if taken >= self._portion:
                break
        return chosen, (ratios[0][0] if ratios else np.inf)


def _gaps(graph: Graph) -> tuple[Ints, Ints, Ints]:
    """Lists the idle gaps: value, the operator that uses it, and the next, non-adjacent one that does."""
    value = np.concatenate([np.arange(graph.values), graph.read_value])
    op_id = np.concatenate([graph.value_op, graph.read_op])
    order = np.lexsort((op_id, value))
    value, op_id = value[order], op_id[order]
    is_gap = (value[1:] == value[:-1]) & (op_id[1:] > op_id[:-1] + 1) & (graph.value_bytes[value[:-1]] > 0)
    return value[:-1][is_gap], op_id[:-1][is_gap], op_id[1:][is_gap]
