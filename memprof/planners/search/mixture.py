"""Chooses for each module whether its tensors are saved, kept in part, recomputed or moved: the cheapest mixture.

A multiple-choice knapsack problem over modules and options, with one constraint for each moment of the step at which
memory may peak (its integer program is that of MONeT's and Checkmate's papers in miniature, with modules in place of
operators). Bytes and times of single choices are measured by replay and added up to find a mixture; the mixture is then
replayed as a whole, and what the sum got wrong tightens or loosens the budget of the next one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from scipy.optimize import LinearConstraint
from scipy.sparse import csr_array

from memprof.planners.graph.solver import solve
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.effects import Effects, merged
from memprof.planners.search.workbench import Workbench, rank
from memprof.policies.base import Policy
from memprof.trace.schema import Floats, Ints

#: Mixtures replayed for one combination of other policies, before single choices are improved.
_MOST_ROUNDS = 6
#: Single choices replaced by cheaper ones at the end.
_MOST_IMPROVED = 12
#: Moments added to the constraints at a time, and how often.
_MOMENTS_ADDED, _MOST_ADDED = 12, 12
#: Distance from the optimum at which the solver may stop, as a share of the cost, and its time limit in seconds.
_GAP, _SOLVER_S = 0.002, 1.0
#: Mixtures whose peak is below the budget by less than this share of it are not loosened.
_CLOSE = 0.002


class Mixture:
    """Searches mixtures on top of one combination of other policies."""

    def __init__(self, bench: Workbench, frame: tuple[Policy, ...], effects: Effects, budget_bytes: int) -> None:
        """Prepares a search.

        Args:
            bench: Replays plans.
            frame: The other policies.
            effects: The effects of single choices on top of them.
            budget_bytes: Most bytes that a plan may need.
        """
        self._bench = bench
        self._frame = frame
        self._effects = effects
        self._budget = budget_bytes
        self._apart = _one_of(effects.modules)
        self._is_banned = np.zeros(len(effects.modules), dtype=np.bool_)

    def search(self) -> Candidate | None:
        """Returns the fastest mixture found that fits; None if there is none."""
        allowance = float(self._budget)
        best: tuple[Candidate, Ints] | None = None
        seen: set[tuple[int, ...]] = set()
        for _ in range(_MOST_ROUNDS):
            chosen = self._choose(allowance)
            if chosen is None or self._bench.is_late() or tuple(chosen.tolist()) in seen:
                break
            seen.add(tuple(chosen.tolist()))
            found = self._try(chosen)
            if found is None:
                if not self._ban(chosen):
                    break
                continue
            spare = self._budget - self._bench.needed(found)
            if spare >= 0 and (best is None or rank(found) < rank(best[0])):
                best = found, chosen
            if 0 <= spare < _CLOSE * self._budget:
                break
            allowance = min(allowance + spare, allowance + 0.9 * spare) if spare > 0 else allowance + spare
        return None if best is None else self._improved(*best)

    def _choose(self, allowance: float) -> Ints | None:
        """Solves the knapsack problem for a peak; returns the chosen columns, None where nothing fits."""
        effects = self._effects
        needed = effects.live - allowance
        moments = _highest(needed, _MOMENTS_ADDED)
        if not len(moments):
            return np.empty(0, dtype=np.int64)
        cost = np.maximum(effects.cost_us, 0.0) + 1e-3
        cost[self._is_banned] = cost.sum() * 1e3
        for _ in range(_MOST_ADDED):
            constraints = [LinearConstraint(effects.freed[moments], lb=needed[moments])]
            if self._apart.shape[0]:
                constraints.append(LinearConstraint(self._apart, ub=np.ones(self._apart.shape[0])))
            found = solve(
                cost / cost.max(),
                constraints=constraints,
                integrality=np.ones(len(cost)),
                bounds=(0.0, 1.0),
                options={"mip_rel_gap": _GAP, "time_limit": _SOLVER_S},
            )
            if found.x is None:
                return None
            chosen = np.flatnonzero(found.x > 0.5)
            missing = needed - effects.freed[:, chosen].sum(axis=1)
            more = np.setdiff1d(_highest(missing, _MOMENTS_ADDED), moments)
            if not len(more):
                return chosen
            moments = np.append(moments, more)
        return chosen

    def _policies(self, chosen: Ints) -> tuple[Policy, ...]:
        """Returns the policies of some columns, one for each distinct setting."""
        effects = self._effects
        made = []
        for option in np.unique(effects.option_of[chosen]).tolist():
            picked = effects.options[option]
            names = {effects.modules[column] for column in chosen[effects.option_of[chosen] == option].tolist()}
            if picked.group.is_whole and len(names) == len(picked.group.members):
                made.append(picked.make((picked.group.pattern,)))
            else:
                made.append(picked.make(tuple(name for name in picked.group.members if name in names)))
        return merged(made)

    def _try(self, chosen: Ints) -> Candidate | None:
        return self._bench.try_plan(*self._frame, *self._policies(chosen))

    def _ban(self, chosen: Ints) -> bool:
        """Bans the option of a refused mixture with the fewest modules; returns whether others are left."""
        options, counts = np.unique(self._effects.option_of[chosen], return_counts=True)
        if len(options) < 2:
            return False
        self._is_banned |= self._effects.option_of == options[np.argmin(counts)]
        return True

    def _improved(self, best: Candidate, chosen: Ints) -> Candidate:
        """Replaces single choices by cheaper ones for the same module, or by none, while the plan still fits."""
        effects = self._effects
        started = time.monotonic()
        for _ in range(_MOST_IMPROVED):
            spare = self._budget - self._bench.needed(best)
            swaps = self._cheaper(chosen, spare)
            for column, other in swaps[:3]:
                fewer = np.sort(np.append(chosen[chosen != column], other))
                found = self._try(fewer[fewer >= 0])
                if found is not None and self._bench.needed(found) <= self._budget and rank(found) < rank(best):
                    best, chosen = found, fewer[fewer >= 0]
                    break
            else:
                return best
            if time.monotonic() - started > _SOLVER_S * 3 or not len(effects.modules):
                return best
        return best

    def _cheaper(self, chosen: Ints, spare: int) -> list[tuple[int, int]]:
        """Lists replacements that should still fit, as chosen column and other column, most time saved first.

        The other column is -1 for none.
        """
        effects = self._effects
        at = np.argmax(effects.live - effects.freed[:, chosen].sum(axis=1))
        found: list[tuple[float, int, int]] = []
        for column in chosen.tolist():
            same = np.flatnonzero([name == effects.modules[column] for name in effects.modules])
            for other in (-1, *same[~self._is_banned[same]].tolist()):
                freed = effects.freed[at, column] - (effects.freed[at, other] if other >= 0 else 0.0)
                saved = effects.cost_us[column] - (effects.cost_us[other] if other >= 0 else 0.0)
                if other != column and saved > 0 and freed <= spare:
                    found.append((-saved, column, other))
        return [(column, other) for _, column, other in sorted(found)]


def _one_of(modules: Sequence[str]) -> csr_array:
    """Returns the constraints that no module is chosen twice, nor together with one around it: a row each."""
    names = dict.fromkeys(modules)
    around = {name: {name, *(other for other in names if name.startswith(f"{other}."))} for name in names}
    covered = set().union(*(those - {name} for name, those in around.items())) if names else set()
    leaves = [name for name in names if name not in covered]
    rows, columns = [], []
    for row, leaf in enumerate(leaves):
        inside = [column for column, name in enumerate(modules) if name in around[leaf]]
        rows += [row] * len(inside)
        columns += inside
    return csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(leaves), len(modules)))


def _highest(needed: Floats, most: int) -> Ints:
    """Returns the moments at which most is missing, at most one in each of ``most`` sections of the step."""
    edges = np.linspace(0, len(needed), most + 1).astype(np.int64)
    places = [int(first + np.argmax(needed[first:last])) for first, last in zip(edges, edges[1:]) if last > first]
    return np.array([place for place in places if needed[place] > 0.5], dtype=np.int64)
