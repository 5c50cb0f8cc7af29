"""Plans evictions once the steps of a job are equal, and looks victims up in the plan instead of choosing them."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass

from memprof.errors import PolicyError
from memprof.policies.evict.planned import planned_course
from memprof.policies.remat.cells import Cell, Need
from memprof.policies.remat.observation import Observation
from memprof.policies.remat.sequence import MOST_POSITIONS, Position, Sequence
from memprof.policies.remat.victims import may_go

#: Number of first steps that are observed; a later one follows a step whose operators had run in the same order before.
_OBSERVED = 3
#: Planned victims to look ahead if the next one may not be dropped at this moment.
_AHEAD = 8


@dataclass
class _Plan:
    """The evictions of one sequence of operators.

    Attributes:
        victims: Turns of the contents to evict, in order.
        again_us: Time of the recomputed operators in the observed step, whose victims were chosen without a plan.
        chosen: The victims of that step.
        is_tried: Whether a step under the plan was compared with it.
    """

    victims: list[int]
    again_us: float
    chosen: list[int]
    is_tried: bool = False


class Schedule:
    """The planned evictions of a job's steps.

    While steps differ, victims are chosen by the heuristic. A step whose operators have run in the same order before is
    observed, and the next such step follows a plan made from it. Where a step leaves the known sequence, or a planned
    victim may not be dropped, the heuristic chooses: a plan never decides whether there is room, nor what is computed.

    Attributes:
        observation: The record of the running step; None if it is not observed.
    """

    def __init__(self, sequence: Sequence, heuristic: str, *, can_plan: bool) -> None:
        """Starts without plans.

        Args:
            sequence: The operators.
            heuristic: A name in ``HEURISTICS``.
            can_plan: Whether to plan at all: False with swapping, where an evicted content may be copied back instead.
        """
        self._sequence = sequence
        self._limit_bytes, self._heuristic, self._can_plan = 0, heuristic, can_plan
        self._turns: list[weakref.ref[Cell]] = []
        self._evicted: list[int] = []
        self._has_chosen = False
        self._plans: dict[Position, _Plan] = {}
        self._followed: dict[Position | None, Counter[Position]] = {}  # ends of steps, by that of the step before
        self._last: Position | None = None
        self._due: tuple[Observation, Position, float, list[int]] | None = None
        self._steps = 0
        self._plan: _Plan | None = None
        self._queue: list[int] = []
        self.observation = Observation() if can_plan else None

    def begin(self) -> None:
        """Starts a step: autograd is about to save the first tensor."""
        if self._due is not None:
            self._make_plan(*self._due)
            self._due = None
        if self._sequence.begin():
            self._plans.clear()
            self._followed.clear()
        ends = self._followed.get(self._last) or self._followed.get(None)
        self._plan = self._plans.get(ends.most_common(1)[0][0]) if ends else None
        self._queue = [] if self._plan is None else self._plan.victims[::-1]

    def end(self, again_us: float) -> None:
        """Ends a step: autograd keeps nothing."""
        sequence, end = self._sequence, self._sequence.position
        is_known = sequence.is_known
        self._steps += 1
        for before in (self._last, None):
            self._followed.setdefault(before, Counter())[end] += 1
        self._last = end
        plan = self._plans.get(end)
        if plan is None and is_known and self.observation is not None:
            if self._evicted:
                self._due = self.observation, end, again_us, self._evicted
            else:
                self._plans[end] = _Plan([], again_us, [], is_tried=True)
        elif plan is not None and plan is self._plan:
            self._compare(plan, again_us)
        is_observed = self._can_plan and end not in self._plans and self._due is None
        is_observed &= is_known or self._steps < _OBSERVED
        self.observation = Observation() if is_observed else None
        self._turns.clear()
        self._evicted, self._has_chosen, self._plan, self._queue = [], False, None, []
        sequence.end()

    def limit(self, limit_bytes: int) -> None:
        """Sets the maximum of bytes at once: plans for another one are dropped."""
        self._limit_bytes = limit_bytes
        self._plans.clear()
        self._due = None

    def observe(self, need: Need, name: str, used_bytes: int) -> None:
        """Notes an operator of the observed step; stops observing at ``MOST_POSITIONS`` operators.

        Args:
            need: Bytes and time of its kind.
            name: Its name.
            used_bytes: Allocated bytes before it runs.
        """
        assert self.observation is not None
        self.observation.operator(need, name, used_bytes)
        if len(self.observation) > MOST_POSITIONS:
            self.observation = None

    def saved(self, cell: Cell) -> None:
        """Numbers a content that autograd saves."""
        cell.turn = len(self._turns)
        self._turns.append(weakref.ref(cell))
        if self.observation is not None:
            self.observation.saved(cell)

    def replace(self, cell: Cell, later: Cell) -> None:
        """Gives a content's turn to the one that an in-place operator replaced it with."""
        later.turn = cell.turn
        self._turns[cell.turn] = weakref.ref(later)
        if self.observation is not None:
            self.observation.replaced(later)

    def next_victim(self) -> Cell | None:
        """Returns the next planned victim that may go, None without one."""
        queue = self._queue
        if not queue or not self._sequence.is_known:
            return None
        for place in range(len(queue) - 1, max(len(queue) - 1 - _AHEAD, -1), -1):
            turn = queue[place]
            cell = self._turns[turn]() if turn < len(self._turns) else None
            if cell is not None and may_go(cell):
                del queue[place]
                self._evicted.append(turn)
                return cell
        return None

    def chosen(self, cell: Cell) -> None:
        """Records a victim that was chosen by the rule."""
        self._has_chosen = True
        self._evicted.append(cell.turn)
        if self.observation is not None:
            self.observation.dropped(cell)

    def _compare(self, plan: _Plan, again_us: float) -> None:
        """Keeps the plan or the observed choices, whichever recompute less; adds victims chosen during the step."""
        if self._has_chosen:
            plan.victims = self._evicted
        if not plan.is_tried:
            plan.is_tried = True
            if again_us > plan.again_us:
                plan.victims = plan.chosen

    def _make_plan(self, observation: Observation, end: Position, again_us: float, chosen: list[int]) -> None:
        outline = observation.outline()
        try:
            course = planned_course(outline, self._limit_bytes, self._heuristic, frozenset())
        except PolicyError:
            victims = chosen  # that step fitted, so its observation is inexact: repeat its own choices
        else:
            victims = [observation.turn_of(number) for number in course.dropped]
        self._plans[end] = _Plan(victims, again_us, chosen)
