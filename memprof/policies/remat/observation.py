"""Observes one step of a job, so that its evictions can be planned."""

from __future__ import annotations

import weakref

import numpy as np

from memprof.policies.evict.outline import Outline, cannot_be_remade
from memprof.policies.remat.cells import Cell, Need, Recipe
from memprof.policies.remat.victims import may_go


class Observation:
    """Operators and contents of a step in the order in which they come, numbered from when autograd kept nothing.

    The contents of one storage, which in-place operators replace one by the next, count as one.
    """

    def __init__(self) -> None:
        self._needs: list[Need] = []
        self._names: list[str] = []
        self._used_bytes: list[int] = []  # before each operator
        self._reads: list[list[int]] = []
        self._pending: list[int] = []  # read since the last operator
        self._size_bytes: list[int] = []
        self._created: list[int] = []
        self._freed: dict[int, int] = {}
        self._free_from: dict[int, int] = {}
        self._makers: dict[int, list[int]] = {}
        self._sources: dict[int, list[int]] = {}
        self._held: dict[int, weakref.ref[Cell]] = {}  # saved, and held by more than autograd
        self._turns: dict[int, int] = {}
        self._present: set[int] = set()
        self._changes: list[tuple[int, int]] = []  # contents that came into memory (1) and left it (-1)
        self._marks: list[int] = []  # changes before each operator

    def __len__(self) -> int:
        return len(self._needs)

    def operator(self, need: Need, name: str, used_bytes: int) -> None:
        """Notes an operator that is about to run.

        Args:
            need: Bytes and time of its kind.
            name: Its name.
            used_bytes: Allocated bytes now.
        """
        self._free_held(len(self._needs))
        self._needs.append(need)
        self._names.append(name)
        self._used_bytes.append(used_bytes)
        self._reads.append(self._pending)
        self._marks.append(len(self._changes))
        self._pending = []

    def made(self, cell: Cell, recipe: Recipe, before: Cell | None = None) -> None:
        """Notes a content that the operator made."""
        if not self._needs:
            return
        op = len(self._needs) - 1
        if before is None:
            number = len(self._size_bytes)
            self._size_bytes.append(cell.size_bytes)
            self._created.append(op)
            self._makers[number], self._sources[number] = [], []
        elif before.number_in_step < 0:
            return
        else:
            number = before.number_in_step
        cell.number_in_step = number
        self._makers[number].append(op)
        sources = self._sources[number]
        sources += [
            source
            for each in recipe.inputs
            if (source := each.number_in_step) >= 0 and source != number and source not in sources
        ]
        self.came(cell)

    def came(self, cell: Cell) -> None:
        """Notes that a content is in memory."""
        number = cell.number_in_step
        if number >= 0 and number not in self._present:
            self._present.add(number)
            self._changes.append((number, 1))

    def left(self, cell: Cell) -> None:
        """Notes that a content is not in memory any more; unless autograd saves it, nothing needs it after this."""
        number = cell.number_in_step
        if number < 0:
            return
        if number in self._present:
            self._present.discard(number)
            self._changes.append((number, -1))
        if not cell.saved:
            self._freed.setdefault(number, len(self._needs) - 1)

    def saved(self, cell: Cell) -> None:
        """Notes that autograd saves a content, whose turn is known."""
        if cell.number_in_step >= 0:
            self._turns[cell.number_in_step] = cell.turn
            if cell.number_in_step not in self._free_from:
                self._held[cell.number_in_step] = weakref.ref(cell)

    def replaced(self, cell: Cell) -> None:
        """Notes that an in-place operator made a content of a saved one."""
        if cell.number_in_step in self._held:
            self._held[cell.number_in_step] = weakref.ref(cell)

    def read(self, cell: Cell) -> None:
        """Notes that backward is about to need a content."""
        if cell.number_in_step >= 0:
            self._pending.append(cell.number_in_step)

    def dropped(self, cell: Cell) -> None:
        """Notes an eviction."""
        self._free(cell.number_in_step, len(self._needs))

    def turn_of(self, number: int) -> int:
        """Returns the turn in which autograd saved a content."""
        return self._turns[number]

    def outline(self) -> Outline:
        """Returns the outline of the step."""
        total, count = len(self._needs), len(self._size_bytes)
        sizes = self._size_bytes
        freed = [self._freed.get(number, total) for number in range(count)]
        can_recompute = ~cannot_be_remade(self._sources, np.array(freed, dtype=np.int64))
        free_from = {number: op for number, op in self._free_from.items() if can_recompute[number]}
        born_bytes, made_bytes = [0] * total, [0] * total
        for number, op in enumerate(self._created):
            made_bytes[op] += sizes[number]
            born_bytes[op] += sizes[number] if number in free_from else 0
        fixed = []  # bytes before each operator of all that may not go
        present_bytes = done = 0
        for used_bytes, mark in zip(self._used_bytes, self._marks, strict=True):
            for number, sign in self._changes[done:mark]:
                present_bytes += sign * sizes[number] if number in free_from else 0
            done = mark
            fixed.append(used_bytes - present_bytes)
        highest = [max(need.highest_bytes, 0) for need in self._needs]
        return Outline(
            size_bytes=sizes,
            may_go=[number in free_from for number in range(count)],
            can_recompute=can_recompute.tolist(),
            created=self._created,
            freed=freed,
            free_from=free_from,
            makers=self._makers,
            sources=self._sources,
            cost_us=[need.least_us for need in self._needs],
            workspace_bytes=[max(high - made, 0) for high, made in zip(highest, made_bytes, strict=True)],
            floor_bytes=[now + high - born for now, high, born in zip(fixed, highest, born_bytes, strict=True)],
            floor_after_bytes=[*fixed[1:], *fixed[-1:]],
            reads=[[number for number in numbers if number in free_from] for numbers in self._reads],
            what=self._names,
        )

    def _free_held(self, op: int) -> None:
        """Notes the saved contents that only autograd holds now."""
        for number, reference in list(self._held.items()):
            cell = reference()
            if cell is None or not cell.saved:
                del self._held[number]
            elif may_go(cell):
                self._free(number, op)

    def _free(self, number: int, op: int) -> None:
        if number >= 0:
            self._held.pop(number, None)
            self._free_from.setdefault(number, op)
