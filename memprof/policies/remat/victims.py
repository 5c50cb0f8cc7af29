"""Chooses eviction victims: large, stale and cheap to recompute.

Source: Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021, section 4.1 and appendix C: h = (own cost + cost
of the dropped neighbourhood) / (bytes x staleness), with the neighbourhood kept as classes of a union-find structure
(h-DTR-eq), and with a sample of the candidates instead of all (appendix E.2). The msps heuristic omits staleness and
counts only what is needed to recompute a value (after Peng et al., Capuchin, ASPLOS 2020).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from memprof.policies.remat.cells import Cell

HEURISTICS = ("eq-class", "msps")
#: Candidates sampled per victim, and dropped values without a class visited per candidate.
_SAMPLE, _WALK = 48, 24
_use_count = torch._C._storage_Use_Count


class Victims:
    """The eviction candidates: cells that autograd saved, in memory and not held by anything else."""

    def __init__(self, heuristic: str) -> None:
        """Starts empty."""
        self._is_stale_cheap = heuristic == "eq-class"
        self._pool: list[Cell] = []
        self._random = random.Random(0)  # a separate generator, which leaves the job's random numbers unchanged
        self._joined_to: list[int] = []
        self._class_us: list[float] = []

    def __len__(self) -> int:
        """Returns the number of candidates, including those in use."""
        return len(self._pool)

    def add(self, cell: Cell) -> None:
        """Adds a cell."""
        if cell.slot < 0:
            cell.slot = len(self._pool)
            self._pool.append(cell)

    def remove(self, cell: Cell) -> None:
        """Removes a cell."""
        if cell.slot >= 0:
            last = self._pool.pop()
            if last is not cell:
                self._pool[cell.slot] = last
                last.slot = cell.slot
            cell.slot = -1

    def choose(self, clock_us: float) -> Cell | None:
        """Returns the cell with the least h in a sample, None if none can be dropped.

        Args:
            clock_us: Current time on the clock of summed operator time.
        """
        pool = self._pool
        count = len(pool)
        picked = pool if count <= _SAMPLE else [pool[self._random.randrange(count)] for _ in range(_SAMPLE)]
        best, least = None, 0.0
        for cells in (picked, pool):
            for cell in cells:
                if may_go(cell):
                    h = self.h(cell, clock_us)
                    if best is None or h < least:
                        best, least = cell, h
            if best is not None or cells is pool:
                return best
        return best

    def h(self, cell: Cell, clock_us: float) -> float:
        """Returns the cost of dropping a cell relative to its benefit: less is better."""
        cost_us = self.remake_us(cell)
        if self._is_stale_cheap:
            return cost_us / (cell.size_bytes * (clock_us - cell.used_us + 1e-3))
        return cost_us / cell.size_bytes

    def remake_us(self, cell: Cell) -> float:
        """Returns the time to recompute a cell, with the dropped ones around it."""
        total_us = _own_us(cell)
        classes: set[int] = set()
        seen: set[int] = set()
        ways = (_above, _below) if self._is_stale_cheap else (_above,)
        for way in ways:
            stack, steps = [cell], 0
            while stack and steps < _WALK:
                for other in way(stack.pop()):
                    if other.is_there() or other.recipe is None or id(other) in seen:
                        continue
                    seen.add(id(other))
                    steps += 1
                    if other.class_number >= 0 and self._is_stale_cheap:
                        classes.add(self._class_of(other.class_number))
                    elif other.place is None:
                        total_us += _own_us(other)
                        stack.append(other)
        return total_us + sum(self._class_us[number] for number in classes)

    def dropped(self, cell: Cell) -> None:
        """Puts a dropped cell into a class, merged with those of its dropped neighbours."""
        number = len(self._joined_to)
        self._joined_to.append(number)
        self._class_us.append(_own_us(cell))
        cell.class_number = number
        for way in (_above, _below):
            for other in way(cell):
                if other.class_number >= 0 and not other.is_there():
                    near = self._class_of(other.class_number)
                    if near != number:
                        self._joined_to[near] = number
                        self._class_us[number] += self._class_us[near]

    def made_again(self, cell: Cell) -> None:
        """Removes a cell from its class; classes are never split."""
        if cell.class_number >= 0:
            number = self._class_of(cell.class_number)
            self._class_us[number] = max(0.0, self._class_us[number] - _own_us(cell))
            cell.class_number = -1

    def forget_classes(self) -> None:
        """Resets the classes when no cell is in one."""
        self._joined_to.clear()
        self._class_us.clear()

    def _class_of(self, number: int) -> int:
        while self._joined_to[number] != number:
            self._joined_to[number] = number = self._joined_to[self._joined_to[number]]
        return number


def may_go(cell: Cell) -> bool:
    """Returns whether dropping a cell would free its memory and its content could be restored."""
    hold = cell.hold
    return (
        hold is not None
        and not cell.locks
        and not cell.is_kept
        and cell.recipe is not None
        and cell.recipe.can_repeat
        and cell.size_bytes > 0
        and _use_count(hold._cdata) == 1
    )


def _own_us(cell: Cell) -> float:
    """Returns the time of a cell's operators: the last one, and those whose result it changed in place."""
    recipe = cell.recipe
    total_us = 0.0
    while recipe is not None:
        total_us += recipe.cost_us
        before = recipe.changes
        recipe = before.recipe if before is not None and not before.is_there() else None
    return total_us


def _above(cell: Cell) -> Iterator[Cell]:
    """Yields the cells a cell is computed from; earlier contents of its storage count as its own."""
    recipe = cell.recipe
    for made_from in recipe.inputs if recipe is not None else ():
        if recipe is not None and recipe.changes is made_from and not made_from.is_there():
            yield from _above(made_from)
        else:
            yield made_from


def _below(cell: Cell) -> Iterator[Cell]:
    """Yields the cells computed from a cell, each as its storage's latest content."""
    for recipe in cell.live_readers():
        for output in recipe.outputs:
            made = output()
            while made is not None and not made.is_there() and (later := _changed_to(made)) is not None:
                made = later
            if made is not None:
                yield made


def _changed_to(cell: Cell) -> Cell | None:
    """Returns the result of an in-place operator on a cell, None if there is none."""
    for recipe in cell.live_readers():
        if recipe.changes is cell:
            return recipe.outputs[0]() if recipe.outputs else None
    return None
