"""Repeats the evictions of earlier steps: once steps are equal, victims are looked up instead of chosen."""

from __future__ import annotations

import math
import weakref

from memprof.policies.remat.cells import Cell
from memprof.policies.remat.sequence import Position, Sequence
from memprof.policies.remat.victims import may_go

#: Steps equal to earlier ones whose choices are compared before one schedule is fixed.
_COMPARED = 2


class Schedule:
    """The victims of the steps of a job, by operator and by the order in which autograd saved them.

    A step whose operators have run in the same order before evicts what the best of these steps has evicted. Where it
    differs, or a scheduled victim may not go, victims are chosen anew: the schedule saves time and decides nothing.
    """

    def __init__(self, sequence: Sequence) -> None:
        """Stores the sequence of operators."""
        self._sequence = sequence
        self._turns: list[weakref.ref[Cell]] = []
        self._chosen: list[tuple[Position, int]] = []
        self._last: _Step | None = None
        self._steps: weakref.WeakKeyDictionary[Position, _Step] = weakref.WeakKeyDictionary()
        self.is_fixed = False

    def begin(self) -> None:
        """Starts a step: autograd is about to save the first tensor."""
        self._sequence.begin()
        self.is_fixed = self._last is not None and self._last.count >= _COMPARED

    def end(self, again_us: float) -> None:
        """Ends a step: autograd keeps nothing.

        Args:
            again_us: Time of its recomputed operators.
        """
        sequence = self._sequence
        self._last = None
        if sequence.is_known:
            step = self._last = self._steps.setdefault(sequence.position, _Step())
            if step.count < _COMPARED:
                step.count += 1
                step.keep(self._chosen, again_us)
        elif sequence.position.victims is not None:
            self._last = self._steps.setdefault(sequence.position, _Step())
        self._turns.clear()
        self._chosen.clear()
        sequence.end()

    def saved(self, cell: Cell) -> None:
        """Numbers a content that autograd saves for the first time."""
        cell.turn = len(self._turns)
        self._turns.append(weakref.ref(cell))

    def replace(self, cell: Cell, later: Cell) -> None:
        """Gives a content's number to the one that an in-place operator replaced it with."""
        later.turn = cell.turn
        self._turns[cell.turn] = weakref.ref(later)

    def next_victim(self) -> Cell | None:
        """Returns the scheduled victim, None if there is none that may go."""
        if not self.is_fixed:
            return None
        sequence = self._sequence
        victims = sequence.position.victims
        if victims is None or sequence.taken >= len(victims):
            return None
        turn = victims[sequence.taken]
        sequence.taken += 1
        cell = self._turns[turn]() if turn < len(self._turns) else None
        return cell if cell is not None and may_go(cell) else None

    def chosen(self, cell: Cell) -> None:
        """Records a victim that was chosen without a schedule."""
        if not self.is_fixed:
            self._chosen.append((self._sequence.position, cell.turn))


class _Step:
    """The best choices for one sequence of operators."""

    def __init__(self) -> None:
        self.count = 0
        self._again_us = math.inf
        self._positions: list[Position] = []

    def keep(self, chosen: list[tuple[Position, int]], again_us: float) -> None:
        """Takes the choices of a step if they led to less recomputation than those before."""
        if again_us >= self._again_us:
            return
        self._again_us = again_us
        for position in self._positions:
            position.victims = []
        self._positions = list(dict.fromkeys(position for position, _ in chosen if position.victims is not None))
        for position in self._positions:
            position.victims = []
        for position, turn in chosen:
            if position.victims is not None:
                position.victims.append(turn)
