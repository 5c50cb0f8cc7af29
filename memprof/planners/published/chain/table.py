"""Dynamic programme over a chain of stages, for every budget at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memprof.planners.graph.stages import Line
from memprof.planners.graph.writing import Walk
from memprof.planners.published.chain.options import StageCosts
from memprof.trace.schema import NONE, Floats, Ints

#: Slots of memory that the budget is divided into: as many as keep stages cubed times slots below the work, clamped to
#: the other two.
_WORK, _FEWEST_SLOTS, _MOST_SLOTS = 20_000_000, 300, 4000


@dataclass(frozen=True, eq=False)
class Grid:
    """A chain's sizes in slots, rounded up.

    Attributes:
        slot_bytes: Bytes of a slot.
        origin_bytes: Bytes alive before the first slot.
        slots: Number of slots.
        beside: Slots of other live memory when the backward of each stage begins; 0 for the last, whose windows begin
            in forward.
        first: Slots of other live memory when the first forward of each stage begins.
        turn: Slots of other live memory when backward begins.
    """

    slot_bytes: int
    origin_bytes: int
    slots: int
    beside: Ints
    first: Ints
    turn: int

    def slots_of(self, size: int) -> int:
        """Rounds bytes up to slots."""
        return -(-size // self.slot_bytes)

    def bytes_of(self, slots: int) -> int:
        """Returns the live bytes for a number of slots taken."""
        return self.origin_bytes + slots * self.slot_bytes


def grid_of(line: Line, costs: list[StageCosts], peak_bytes: int) -> Grid:
    """Divides the bytes up to a peak into slots, exactly where the sizes allow it."""
    first = [line.bytes_before(stage.first_op) for stage in line.stages]
    beside = [line.bytes_before(stage.backward_op) for stage in line.stages]
    origin = min(*first, *beside)
    sizes = {size - origin for size in (*first, *beside)} | {peak_bytes - origin}
    for cost in costs:
        sizes |= {cost.pass_peak, cost.pass_on_peak, cost.first_pass_peak, cost.first_pass_on_peak, cost.output_bytes}
        for option in cost.options:
            sizes |= {option.held_bytes, option.first_peak, option.forward_peak, option.backward_peak}
    slots = min(max(_WORK // len(costs) ** 3, _FEWEST_SLOTS), _MOST_SLOTS)
    exact = math.gcd(*sizes)
    span = max(peak_bytes - origin, 1)
    size = exact if exact and span // exact <= slots else -(-span // slots)
    rounded = [-(-(value - origin) // size) for value in beside]
    return Grid(
        slot_bytes=size,
        origin_bytes=origin,
        slots=span // size,
        beside=np.array([*rounded[:-1], 0]),
        first=np.array([-(-(value - origin) // size) for value in first]),
        turn=rounded[-1],
    )


class Table:
    """Least times of every window of a chain: stages *a* to *b*, with the input live and the backward next.

    A window's memory is counted from the other live memory when it begins, so windows of identical layers are equal and
    solved once.

    Source: Beaumont et al. 2020 (Optimal checkpointing for heterogeneous chains), theorem 1 and algorithm 2. Our
    changes: time counts what is added to the recorded step, so the first forward is free; and memory outside the stages
    (gradients that appear in backward) shifts the budget of a window.
    """

    def __init__(self, line: Line, costs: list[StageCosts], grid: Grid, is_late: Callable[[], bool]) -> None:
        """Solves all windows.

        Raises:
            TimeoutError: The deadline passed first.
        """
        self._line, self._costs, self._grid = line, costs, grid
        self._last = len(costs) - 1
        self._sizes = np.arange(grid.slots + 1)
        # Rows are windows, shared by equal ones; the column after the last stands for "does not fit".
        self._tables: list[Floats] = []
        self._row = np.full((len(costs), len(costs)), NONE)
        self._output = np.array([grid.slots_of(cost.output_bytes) for cost in costs])
        self._solve(is_late)

    @property
    def least_us(self) -> Floats:
        """Least added time for each number of slots, shape ``(slots + 1,)``; infinite where none fits."""
        least: Floats = self._tables[self._row[0, self._last]][:-1]
        return least

    @property
    def windows(self) -> int:
        """Number of windows solved."""
        return len(self._tables)

    @property
    def least_bytes(self) -> int:
        """Smallest budget that has a schedule; the largest of all where none has."""
        fits = np.flatnonzero(np.isfinite(self.least_us))
        return self._grid.bytes_of(int(fits[0]) if len(fits) else self._grid.slots)

    def steps(self) -> Ints:
        """Returns the budgets at which a faster schedule becomes possible, in bytes."""
        least = self.least_us
        found = np.flatnonzero(np.isfinite(least) & (np.append(np.inf, least[:-1]) > least))
        return found * self._grid.slot_bytes + self._grid.origin_bytes

    def walk(self, walk: Walk, budget_bytes: int) -> None:
        """Applies the fastest schedule within a budget; does nothing where none fits."""
        slots = min((budget_bytes - self._grid.origin_bytes) // self._grid.slot_bytes, self._grid.slots)
        if np.isfinite(self.least_us[slots]):
            self._walk_window(walk, 0, self._last, slots)

    def _solve(self, is_late: Callable[[], bool]) -> None:
        kind = [id(cost) for cost in self._costs]  # equal stages share one object
        seen: dict[tuple[object, ...], int] = {}
        stacked = np.full((self._last + 1, self._last + 1, self._grid.slots + 2), np.inf)
        for b in range(self._last + 1):
            for a in range(b, -1, -1):
                if is_late():
                    raise TimeoutError
                beside = self._grid.beside[a : b + 1] - self._grid.beside[b]
                key = (tuple(kind[a : b + 1]), tuple(beside.tolist()), b == self._last)
                if key not in seen:
                    seen[key] = len(self._tables)
                    self._tables.append(self._window(a, b, stacked))
                self._row[a, b] = seen[key]
                stacked[a, b] = self._tables[seen[key]]

    def _window(self, a: int, b: int, stacked: Floats) -> Floats:
        best = np.full(self._grid.slots + 2, np.inf)
        if a == b:
            for spent, needed, _ in self._alone(a):
                if needed <= self._grid.slots:
                    best[needed:-1] = np.minimum(best[needed:-1], spent)
            return best
        for _, spent, held, needed in self._saving(a, b):
            rest = stacked[a + 1, b, self._moved(np.array(-held))]
            rest[:needed] = np.inf
            best[:-1] = np.minimum(best[:-1], spent + rest)
        starts, times, needs = self._passing(a, b)
        right = stacked[starts[:, None], b, self._moved(-self._output[starts - 1])]
        left = stacked[a, starts[:, None] - 1, self._moved(self._shift(starts - 1, b))]
        both = times[:, None] + right + left
        both[self._sizes < needs[:, None]] = np.inf
        best[:-1] = np.minimum(best[:-1], both.min(axis=0))
        return best

    def _moved(self, slots: Ints) -> Ints:
        """Returns the columns of budgets that are larger by some slots, one row per number of slots."""
        moved = self._sizes + slots[..., None]
        columns: Ints = np.where(moved < 0, self._grid.slots + 1, np.minimum(moved, self._grid.slots))
        return columns

    def _shift(self, rows: Ints, b: int) -> Ints:
        """Returns the budget difference between windows that end at given stages and one that ends at b."""
        shift: Ints = self._grid.beside[b] - self._grid.beside[rows]
        return shift

    def _above(self, a: int, b: int) -> int:
        """Returns the slots of other memory that appear between the start of a window and the backward of a."""
        beside = self._grid.turn if a == self._last else int(self._grid.beside[a])
        return beside - int(self._grid.beside[b])

    def _forward_slots(self, row: int, b: int, first_peak: int, forward_peak: int) -> int:
        if b == self._last:
            return int(self._grid.first[row]) + self._grid.slots_of(first_peak)
        return self._grid.slots_of(forward_peak)

    def _alone(self, a: int) -> list[tuple[float, int, int]]:
        """Lists for a one-stage window: time, slots, and the option to keep from forward, NONE for no forward."""
        is_first, found = a == self._last, []
        for number, option in enumerate(self._costs[a].options):
            backward = self._grid.slots_of(option.backward_peak) + self._above(a, a)
            forward = self._forward_slots(a, a, option.first_peak, option.forward_peak)
            spent = option.backward_us + (0.0 if is_first else option.forward_us)
            found.append((spent, max(forward, backward), number))
            if not is_first and not option.kept:
                found.append((option.backward_us, backward, NONE))
        return found

    def _saving(self, a: int, b: int) -> list[tuple[int, float, int, int]]:
        """Lists the options of the first stage of a window: number, time, slots held, slots needed."""
        found = []
        for number, option in enumerate(self._costs[a].options):
            forward = self._forward_slots(a, b, option.first_peak, option.forward_peak)
            backward = self._grid.slots_of(option.backward_peak) + self._above(a, b)
            spent = option.backward_us + (0.0 if b == self._last else option.forward_us)
            found.append((number, spent, self._grid.slots_of(option.held_bytes), max(forward, backward)))
        return [one for one in found if one[3] <= self._grid.slots]

    def _passing(self, a: int, b: int) -> tuple[Ints, Floats, Ints]:
        """Lists where a window's forward can keep a stage's input next: stages, times, slots needed until then."""
        is_first = b == self._last
        needed = []
        for row in range(a, b):
            cost = self._costs[row]
            first, again = (
                (cost.first_pass_peak, cost.pass_peak) if row == a else (cost.first_pass_on_peak, cost.pass_on_peak)
            )
            needed.append(self._forward_slots(row, b, first, again))
        spent = np.cumsum([0.0 if is_first else cost.pass_us for cost in self._costs[a:b]])
        return np.arange(a + 1, b + 1), spent, np.maximum.accumulate(np.array(needed))

    def _least(self, a: int, b: int, slots: int) -> float:
        if slots < 0:
            return math.inf
        return float(self._tables[self._row[a, b]][min(slots, self._grid.slots)])

    def _walk_window(self, walk: Walk, a: int, b: int, slots: int) -> None:
        stages, slots = self._line.stages, min(slots, self._grid.slots)
        if a == b:
            number = min((spent, needed, number) for spent, needed, number in self._alone(a) if needed <= slots)[2]
            if number != NONE:
                walk.save(stages[a], self._kept(a, number))
            walk.backward(stages[a])
            return
        tries: list[tuple[float, int, int]] = []
        for number, spent, held, needed in self._saving(a, b):
            if needed <= slots:
                tries.append((spent + self._least(a + 1, b, slots - held), NONE, number))
        starts, times, needs = self._passing(a, b)
        for start, spent, needed in zip(starts.tolist(), times.tolist(), needs.tolist(), strict=True):
            if needed <= slots:
                right = self._least(start, b, slots - int(self._output[start - 1]))
                left = self._least(a, start - 1, slots + int(self._shift(np.array(start - 1), b)))
                tries.append((spent + right + left, start, NONE))
        _, start, number = min(tries)
        if start == NONE:
            kept = self._kept(a, number)
            walk.save(stages[a], kept)
            self._walk_window(walk, a + 1, b, slots - self._grid.slots_of(self._costs[a].options[number].held_bytes))
            walk.drop(stages[a].outputs, but=kept)
            walk.backward(stages[a])
            return
        walk.advance(stages[a:start])
        self._walk_window(walk, start, b, slots - int(self._output[start - 1]))
        walk.drop(stages[start - 1].outputs)
        self._walk_window(walk, a, start - 1, slots + int(self._shift(np.array(start - 1), b)))

    def _kept(self, row: int, number: int) -> list[int]:
        return [self._line.stages[row].values[place] for place in self._costs[row].options[number].kept]
