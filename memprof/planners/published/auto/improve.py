"""Local search around one schedule, and the Pareto front of the schedules found so far."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from memprof.planners.base import ScheduleRequest
from memprof.planners.published.auto.moves import Moves
from memprof.planners.published.auto.repeats import Repeat
from memprof.trace.schema import Floats

#: Moves between two checks of the deadline and of how often the schedule fitted.
_ROUND = 100
#: The first temperature and the last, in units of the mean cost of an operator.
_HOT, _COLD = 0.1, 0.005


def note(moves: Moves, front: Front) -> None:
    """Keeps the current schedule unless a known one dominates it."""
    state = moves.state
    peak = state.peak_bytes
    if state.extra_us < front.least_us(peak):
        front.add(Choice(peak, max(0.0, state.extra_us), tuple(state.repeats())))


def drop_until_fits(moves: Moves, front: Front, task: ScheduleRequest, budget_bytes: int) -> bool:
    """Drops values one by one, each time the one that saves the most bytes above budget per unit of time.

    Source: Kirisame 2021 (Dynamic Tensor Rematerialization, section 4.1), the MSPS heuristic: recompute time of the
    value and of its missing inputs, over its bytes; here bytes count once for each stage they relieve.

    Returns:
        Whether the schedule fits.
    """
    state = moves.state
    tried: set[tuple[int, int]] = set()
    while not task.is_late():
        note(moves, front)
        above = np.maximum(state.bytes - budget_bytes, 0)
        worst = int(above.argmax())
        if not above[worst]:
            return True
        # Weighted towards the worst stages, so that the peak drops evenly.
        weight: Floats = np.concatenate([[0.0], np.cumsum(above / above[worst])])
        best, best_score = None, 0.0
        for value in moves.candidates:
            gap = state.gap_around(value, worst)
            if gap is None or (value, gap[1]) in tried:
                continue
            relief = state.size[value] * float(weight[gap[1]] - weight[gap[0] + 1])
            score = relief / (moves.cost_of(value, gap[1]) + 1e-9)
            if score > best_score:
                best, best_score = (value, gap[1]), score
        if best is None:
            return False
        tried.add(best)
        moves.make(state.maker[best[0]], best[1], extends=False)
    return False


def exchange(moves: Moves, front: Front, task: ScheduleRequest, budget_bytes: int, *, steps: int) -> None:
    """Anneals around the current schedule: bytes above the budget have a price that rises until it fits.

    Args:
        moves: The schedule, modified in place.
        front: Collects the schedules found.
        task: The request, for its deadline.
        budget_bytes: The budget to fit.
        steps: Number of moves drawn.
    """
    state, draw, graph = moves.state, moves.draw, moves.state.graph
    unit_us = float(graph.cost_us[graph.can_repeat].mean()) if graph.can_repeat.any() else 0.0
    if not moves.candidates or unit_us <= 0:
        return
    price = unit_us / (0.002 * budget_bytes + 1)
    lowest, highest = price * 1e-3, price * 1e3
    above, extra_us = _bytes_above(state.bytes, budget_bytes), state.extra_us
    fits = 0
    for count in range(steps):
        done = moves.step()
        if done:
            new_above, new_extra_us = _bytes_above(state.bytes, budget_bytes), state.extra_us
            worse = new_extra_us - extra_us + price * (new_above - above)
            temperature = unit_us * _HOT * (_COLD / _HOT) ** (count / steps)
            if worse <= 0 or draw.random() < math.exp(-worse / temperature):
                above, extra_us = new_above, new_extra_us
                if not above and extra_us < front.least_us(budget_bytes):
                    note(moves, front)
            else:
                moves.toggle(done)
        fits += not above
        if count % _ROUND == _ROUND - 1:
            if task.is_late():
                return
            if fits > 0.6 * _ROUND:
                price = max(lowest, price / 1.2)
            elif fits < 0.3 * _ROUND:
                price = min(highest, price * 1.2)
            fits = 0


def _bytes_above(bytes_by_stage: np.ndarray, budget_bytes: int) -> float:
    above = bytes_by_stage - budget_bytes
    return float(above[above > 0].sum())


@dataclass(frozen=True)
class Choice:
    """One schedule.

    Attributes:
        peak_bytes: Peak allocated bytes.
        extra_us: Time of its repeats.
        repeats: The repeated operators, each with its stage.
    """

    peak_bytes: int
    extra_us: float
    repeats: tuple[Repeat, ...]


class Front:
    """Keeps the Pareto-optimal choices, ordered by bytes, so a larger budget never gets a slower schedule."""

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self.choices: list[Choice] = []

    def least_us(self, budget_bytes: int) -> float:
        """Returns the least time within a budget; infinity where nothing fits."""
        at = bisect_right(self._peaks, budget_bytes) - 1
        return self.choices[at].extra_us if at >= 0 else float("inf")

    def best(self, budget_bytes: int) -> Choice | None:
        """Returns the fastest choice within a budget."""
        at = bisect_right(self._peaks, budget_bytes) - 1
        return self.choices[at] if at >= 0 else None

    def add(self, choice: Choice) -> None:
        """Adds a choice unless it is dominated, and removes those it dominates."""
        if self.least_us(choice.peak_bytes) <= choice.extra_us:
            return
        low = bisect_left(self._peaks, choice.peak_bytes)
        high = low
        while high < len(self.choices) and self.choices[high].extra_us >= choice.extra_us:
            high += 1
        self.choices[low:high] = [choice]
        self._peaks[low:high] = [choice.peak_bytes]
