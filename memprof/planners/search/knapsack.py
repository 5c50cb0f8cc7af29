"""The knapsack problem of a mixture: the cheapest choices that free enough at every moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from memprof.planners.graph.solver import solve, solve_linear
from memprof.planners.search.effects import Effects, Windows
from memprof.planners.search.groups import around
from memprof.trace.schema import Floats, Ints

if TYPE_CHECKING:
    from scipy.sparse import csr_array, sparray

#: Moments added to the constraints at a time, and how often, for the relaxed problem and for the whole one.
_MOMENTS_ADDED, _MOST_RELAXED, _MOST_WHOLE = 12, 6, 3
#: Distance from the optimum at which the solver may stop, as a share of the cost: at least, and at most.
_GAP, _MOST_GAP = 0.01, 0.3
#: Limits of one call of the solver: nodes, so that results do not depend on the machine, and seconds.
_MOST_NODES, _SOLVER_S = 20, 6.0
#: Columns beside those of the relaxed solution that whole solutions are made of.
_MOST_NEAR = 40


@dataclass(frozen=True, eq=False)
class _Relaxed:
    """Solution of the relaxed problem.

    Attributes:
        share: Share of each column.
        reduced: Cost of each column beyond what the solution pays for the bytes that it frees.
        total: Cost of the solution.
    """

    share: Floats
    reduced: Floats
    total: float

    def near(self) -> Ints:
        """Returns the columns of which whole solutions are made: those used, and those that are nearly as cheap."""
        order = np.lexsort((self.reduced, self.share <= 0))
        used = int(np.count_nonzero(self.share > 0))
        near = order[: used + _MOST_NEAR]
        return np.sort(near[np.isfinite(self.reduced[near])])


@dataclass(frozen=True, eq=False)
class _Problem:
    """A linear program: the least cost where limits times the variables are at most the bounds.

    Attributes:
        cost: Cost of each variable.
        limits: A row for each constraint.
        bounds: Upper bound of each constraint.
        ranges: Least and most of each variable, shape ``(variables, 2)``.
        unit: What a cost of 1 stands for.
    """

    cost: Floats
    limits: csr_array
    bounds: Floats
    ranges: Floats
    unit: float


class Knapsack:
    """Chooses columns, at most one for each module and those around it.

    Attributes:
        host_room: Bytes of pinned host memory that their copies may take; None for any.
    """

    def __init__(self, effects: Effects, slack: float = 0.0) -> None:
        """Prepares the problem.

        Args:
            effects: The effects of each column.
            slack: Cost by which a solution may miss the optimum.
        """
        self._slack = slack
        self._freed = effects.freed
        self._apart = _one_of(effects.modules)
        work_us, room_us = effects.windows.work_us, effects.windows.room_us
        is_busy = np.maximum(work_us, 0.0).sum(axis=1) > room_us  # where copies may take longer than there is time
        self._windows = Windows(work_us[is_busy], room_us[is_busy])
        self._host_bytes = effects.host_bytes
        self.host_room: float | None = None
        self._moments = np.empty(0, dtype=np.int64)
        self._last: tuple[Floats, Floats, float | None, _Relaxed | None] | None = None

    def relaxed_cost(self, cost: Floats, needed: Floats) -> float:
        """Returns the least cost where columns may be chosen in part, a lower bound; infinite if nothing is enough."""
        if needed.max() <= 0:
            return 0.0
        relaxed = self._relax_everywhere(cost, needed)
        return np.inf if relaxed is None else relaxed.total

    def choose(self, cost: Floats, needed: Floats) -> Ints | None:
        """Returns the cheapest columns that free enough at every moment; None if there are none.

        The constraints are added moment by moment, as solutions violate them; the relaxed problem, which is solved
        faster, finds most of them.

        Args:
            cost: Cost of each column; infinite where it may not be chosen.
            needed: Bytes to free at each moment, negative where there is room; shape ``(moments,)``.
        """
        if needed.max() <= 0:
            return np.empty(0, dtype=np.int64)
        relaxed = self._relax_everywhere(cost, needed)
        if relaxed is None:
            return None
        for _ in range(_MOST_WHOLE):
            chosen = self._choose_whole(cost, needed, relaxed)
            if chosen is None:  # none within the limits
                return self._rounded(cost, relaxed.share, needed)
            if not self._add_moments(needed - self._freed[:, chosen].sum(axis=1), needed):
                break
        return chosen

    def _add_moments(self, missing: Floats, needed: Floats) -> bool:
        """Adds constraints where bytes are missing, and returns whether there were new ones.

        Earlier ones stay, so that the next budget begins with them.
        """
        more = np.setdiff1d(_highest(missing), self._moments)
        self._moments = np.append(self._moments, more)
        return bool(len(more))

    def _relax_everywhere(self, cost: Floats, needed: Floats) -> _Relaxed | None:
        """Solves the relaxed problem, adding the moments at which its solution frees too little.

        The last solution is kept: a bound on a mixture is often followed by the search for it.
        """
        if self._last is not None:
            *arrays, host_room, relaxed = self._last
            if host_room == self.host_room and all(map(np.array_equal, arrays, (cost, needed))):
                return relaxed
        self._add_moments(needed, needed)
        relaxed = self._relax(cost, needed)
        for _ in range(_MOST_RELAXED):
            if relaxed is None or not self._add_moments(needed - self._freed @ relaxed.share, needed):
                break
            relaxed = self._relax(cost, needed)
        self._last = cost.copy(), needed.copy(), self.host_room, relaxed
        return relaxed

    def _relax(self, cost: Floats, needed: Floats) -> _Relaxed | None:
        """Solves the problem for any share of each column; returns None where nothing frees enough."""
        allowed = np.flatnonzero(np.isfinite(cost))
        if not len(allowed):
            return None
        problem = self._problem(cost, needed, allowed)
        found = solve_linear(problem.cost, A_ub=problem.limits, b_ub=problem.bounds, bounds=problem.ranges)
        if found.x is None:
            return None
        share = np.zeros(len(cost))
        share[allowed] = found.x[: len(allowed)]
        reduced = np.full(len(cost), np.inf)
        reduced[allowed] = found.lower.marginals[: len(allowed)]
        return _Relaxed(share, reduced, float(found.fun) * problem.unit)

    def _choose_whole(self, cost: Floats, needed: Floats, relaxed: _Relaxed) -> Ints | None:
        """Solves the problem for whole choices near a relaxed solution; returns None where the solver finds nothing."""
        columns = relaxed.near()
        gap = min(max(_GAP, self._slack / max(relaxed.total, 1e-9)), _MOST_GAP)
        problem = self._problem(cost, needed, columns)
        is_choice = np.arange(len(problem.cost)) < len(columns)
        found = solve(
            problem.cost,
            [(problem.limits, -np.inf, problem.bounds)],
            (problem.ranges[:, 0], problem.ranges[:, 1]),
            is_choice.astype(np.int64),
            presolve=False,
            mip_rel_gap=gap,
            node_limit=_MOST_NODES,
            time_limit=_SOLVER_S,
        )
        return None if found.x is None else columns[found.x[: len(columns)] > 0.5]

    def _problem(self, cost: Floats, needed: Floats, columns: Ints) -> _Problem:
        """States the problem for some columns, with a variable more for the wait in each window."""
        from scipy.sparse import block_array, csr_array, eye_array  # slow to import, as in ``_one_of``

        scale = max(float(needed.max()), 1.0)
        most = max(float(cost[columns].max(initial=0.0)), 1e-6)
        moments = self._moments[needed[self._moments] > 0]
        work, room = self._windows.work_us[:, columns] / most, self._windows.room_us / most
        waits = len(room)
        apart = _without_implied(self._apart[:, columns])
        rows: list[list[sparray | None]] = [
            [csr_array(-self._freed[np.ix_(moments, columns)] / scale), None],
            [apart, None],
            [csr_array(work), -eye_array(waits)],
        ]
        bounds = [-needed[moments] / scale, np.ones(apart.shape[0]), room]
        if self.host_room is not None:
            rows.append([csr_array(self._host_bytes[None, columns] / scale), None])
            bounds.append(np.array([max(self.host_room, 0.0) / scale]))
        limits = block_array(rows, format="csr")
        ranges = np.zeros((len(columns) + waits, 2))
        ranges[: len(columns), 1] = 1.0
        ranges[len(columns) :, 1] = np.inf
        cost = np.concatenate([cost[columns] / most, np.ones(waits)])
        return _Problem(cost, limits, np.concatenate(bounds), ranges, most)

    def _rounded(self, cost: Floats, share: Floats, needed: Floats) -> Ints | None:
        """Returns whole columns near a relaxed solution: the largest shares first, until enough is freed.

        Args:
            cost: Cost of each column.
            share: The relaxed solution.
            needed: Bytes to free at each moment.
        """
        chosen: list[int] = []
        taken = np.zeros(self._apart.shape[0])
        missing = needed.astype(np.float64)
        apart = self._apart.tocsc()
        for column in np.lexsort((cost, -share)).tolist():
            rows = apart.indices[apart.indptr[column] : apart.indptr[column + 1]]
            if missing.max() <= 0.5:
                break
            at = int(np.argmax(missing))
            if np.isfinite(cost[column]) and not taken[rows].any() and self._freed[at, column] > 0:
                chosen.append(column)
                taken[rows] = 1.0
                missing -= self._freed[:, column]
        return np.array(sorted(chosen), dtype=np.int64) if missing.max() <= 0.5 else None


def _one_of(modules: Sequence[str]) -> csr_array:
    """Returns the constraints that no module is chosen twice, nor together with one around it: a row each."""
    from scipy.sparse import csr_array  # slow to import, and most commands search no plans

    names = dict.fromkeys(modules)
    above = {name: around(name) & names.keys() for name in names}
    covered = {other for name, those in above.items() for other in those if other != name}
    columns_of: dict[str, list[int]] = {}
    for column, name in enumerate(modules):
        columns_of.setdefault(name, []).append(column)
    rows: list[int] = []
    columns: list[int] = []
    leaves = [name for name in names if name not in covered]
    for row, leaf in enumerate(leaves):
        for name in above[leaf]:
            rows += [row] * len(columns_of[name])
            columns += columns_of[name]
    return csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(leaves), len(modules)))


def _without_implied(apart: csr_array) -> csr_array:
    """Drops the rows whose columns another row has as well, and those of a single column."""
    rows = np.split(apart.indices, apart.indptr[1:-1])
    sets = {frozenset(row.tolist()): number for number, row in enumerate(rows) if len(row) > 1}
    having: dict[int, list[frozenset[int]]] = {}
    for each in sets:
        for column in each:
            having.setdefault(column, []).append(each)
    kept = [number for each, number in sets.items() if not any(each < other for other in having[min(each)])]
    return apart[kept]


def _highest(needed: Floats) -> Ints:
    """Returns the moments at which most bytes are missing, at most one in each section of the step."""
    edges = np.linspace(0, len(needed), _MOMENTS_ADDED + 1).astype(np.int64)
    places = [int(first + np.argmax(needed[first:last])) for first, last in pairwise(edges) if last > first]
    return np.array([place for place in places if needed[place] > 0.5], dtype=np.int64)
