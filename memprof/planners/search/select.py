"""Chooses modules: which run again in backward, wholly or in part, and whose saved tensors are offloaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np

from memprof.planners.search.candidate import Candidate
from memprof.planners.search.effects import Effects, Option, find_options
from memprof.planners.search.groups import are_apart
from memprof.planners.search.knapsack import Knapsack
from memprof.planners.search.measure import live_at, measure_effects
from memprof.planners.search.mixture import Mixture
from memprof.planners.search.workbench import Workbench, rank
from memprof.policies.base import Policy
from memprof.policies.registry import policy_types
from memprof.trace.schema import Ints

#: Share of the step time by which another combination of policies has to be faster to be searched.
_WORTH_TRYING = 2e-3
#: Points between which lower bounds are interpolated to order combinations, and the step time where nothing fits.
_ORDER_POINTS, _NEVER = 5, 1e3
#: Changes of the best plan tried in the end: at most, and operators replayed for them at most.
_MOST_REFINED, _REFINED_OPS = 200, 50_000


class Selection:
    """Chooses modules on top of a combination of other policies, so that the step fits."""

    def __init__(self, bench: Workbench, allowed: set[str], budget_bytes: int) -> None:
        self._bench = bench
        self._budget = budget_bytes
        kinds = [kind for kind in policy_types() if kind.name in allowed]
        self._options = find_options(bench.step, kinds)
        chooses = {type(policy) for option in self._options for policy in option.policies}
        self._before = tuple(policy_types()[: min((policy_types().index(kind) for kind in chooses), default=0)])
        self._measured: dict[tuple[Policy, ...], Effects | None] = {}
        self._searches: list[tuple[Candidate, Mixture]] = []
        self._refined: list[Mixture] = []

    def ordered(self, frames: list[tuple[Policy, ...]]) -> list[tuple[Policy, ...]]:
        """Sorts combinations by the step time to expect with modules chosen on top of each, shortest first.

        What a combination takes and frees is added up from its policies; what the modules cost that free the rest is
        the lower bound without other policies. This is an order only.

        Args:
            frames: The combinations, of which those about equal keep their order.
        """
        effects, archive = self._effects(()), self._bench.archive
        if effects is None:
            return frames
        base = archive[()]
        knapsack, cost_us = Knapsack(effects), np.maximum(effects.cost_us, 0.0)
        freed = np.linspace(0.0, max(float(effects.live.max()) - self._budget, 0.0), _ORDER_POINTS)
        bounds = [knapsack.relaxed_cost(cost_us, effects.live - bytes_ - self._budget) for bytes_ in freed]
        bounds_us = np.minimum(bounds, _NEVER * base.step_time_us)

        def expected_us(frame: tuple[Policy, ...]) -> float:
            alone = [archive[(policy,)] for policy in frame]
            less_bytes = sum(base.peak_bytes - one.peak_bytes for one in alone)
            more_us = sum(one.step_time_us - base.step_time_us for one in alone)
            return base.step_time_us + more_us + float(np.interp(less_bytes, freed, bounds_us))

        return sorted(frames, key=expected_us)

    def choose(self, frame: tuple[Policy, ...], *, roughly: bool = False) -> None:
        """Tries choices on top of a combination; the results are in the bench's archive.

        The fastest is a mixture. Mixtures of one policy are alternatives to the best plan so far and to that without
        other policies, where the combination has nothing that changes the update; a policy for some members of one
        group is simpler to read; and what frees most shows how far the step is from fitting. A combination is left out
        if not even choices in part would make it faster than the best plan so far; without other policies the numbers
        stay the same, so that these choices are always tried.

        Args:
            frame: The combination.
            roughly: Try the first mixture that fits, and nothing else.
        """
        effects = self._effects(frame)
        if effects is None:
            return
        search = Mixture(self._bench, frame, effects, self._budget)
        best = self._bench.fastest(self._budget)
        if frame and best is not None and search.least_us() > best.step_time_us * (1 - _WORTH_TRYING):
            return
        mixture = search.search(roughly=roughly)
        if roughly:
            return
        if mixture is not None:
            self._searches.append((mixture, search))
        kinds = effects.kinds
        is_best = mixture is not None and (best is None or mixture.step_time_us < best.step_time_us)
        may_differ = len(kinds) > 1 and frame in self._measured and not search.is_hopeless
        for kind in kinds if may_differ and (is_best or not frame) else ():
            alone = Mixture(self._bench, frame, effects.of_kind(kind), self._budget)
            found = alone.search()
            if found is not None:
                self._searches.append((found, alone))
        fitting = [row for row in range(len(effects.options)) if effects.peak(effects.columns_of(row)) <= self._budget]
        if fitting:
            cheapest = min(fitting, key=lambda row: float(effects.cost_us[effects.columns_of(row)].sum()))
            self._trim(frame, effects.options[cheapest])
        elif mixture is None:
            self._bench.try_plan(*frame, *effects.policies(_lowest(effects)))

    def refine(self) -> None:
        """Tries changes of the best mixture at random: many where a replay is quick, none if that was done before."""
        if not self._searches:
            return
        _, fastest = min(self._searches, key=lambda one: rank(one[0]))
        if fastest not in self._refined:
            self._refined.append(fastest)
            found = fastest.refined(min(_MOST_REFINED, _REFINED_OPS // max(len(self._bench.step.ops), 1)))
            if found is not None:
                self._searches.append((found, fastest))

    def shorten(self) -> None:
        """Tries plans of fewer settings that are about as fast as the best mixture."""
        if self._searches:
            min(self._searches, key=lambda one: rank(one[0]))[1].shorten()

    def narrow(self) -> None:
        """Finds the least part of what a policy of the fastest plan concerns, such as optimizer state, that is enough.

        Its cost grows with the part, as what it frees does: first with choices of modules made anew for each part, then
        with those of the fastest plan.
        """
        policies = self._fastest()
        frames = (mixture.frame for _, mixture in self._searches)
        frame = max((each for each in frames if set(each) <= set(policies)), key=len, default=policies)
        for policy in policies:
            self._narrow(policy, frame, self._mixed)
        policies = self._fastest()
        for policy in policies:
            self._narrow(policy, policies, lambda plan: self._fits(self._bench.try_plan(*plan)))

    def narrow_frames(self, frames: Iterable[tuple[Policy, ...]]) -> None:
        """Tries combinations that are slower than the best plan with parts of their policies, such as of the state.

        The smallest part has to be faster than the best plan so far.
        """
        for frame in frames:
            for policy in frame:
                parts = policy.narrower(self._bench.step)
                smallest = self._bench.try_plan(*_exchanged(frame, policy, parts[0])) if parts else None
                best = self._bench.fastest(self._budget)
                if smallest is None or best is None or smallest.step_time_us >= best.step_time_us * (1 - _WORTH_TRYING):
                    continue
                self._narrow(policy, frame, self._mixed)

    def _narrow(self, policy: Policy, plan: tuple[Policy, ...], fits: Callable[[tuple[Policy, ...]], bool]) -> None:
        """Bisects the parts of a policy in a plan; what is tried is in the bench's archive."""
        parts = policy.narrower(self._bench.step)

        def fits_with_part(number: int) -> bool:
            return fits(_exchanged(plan, policy, parts[number]))

        self._least(-1, len(parts), fits_with_part)  # without any part it does not fit; with the policy itself it does

    def _least(self, low: int, high: int, fits: Callable[[int], bool]) -> int:
        """Returns the least number whose plan fits, by bisection between one that does not fit and one that does."""
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle):
                high = middle
            else:
                low = middle
        return high

    def _mixed(self, frame: tuple[Policy, ...]) -> bool:
        """Searches a mixture on top of a combination, if it may be faster than the best plan; whether one may fit."""
        effects = None if self._bench.try_plan(*frame) is None else self._effects(frame)
        if effects is None:
            return False
        mixture, best = Mixture(self._bench, frame, effects, self._budget), self._bench.fastest(self._budget)
        if best is not None and (least_us := mixture.least_us()) > best.step_time_us * (1 - _WORTH_TRYING):
            return math.isfinite(least_us)
        found = mixture.search()
        if found is not None:
            self._searches.append((found, mixture))
        return self._fits(found)

    def _fastest(self) -> tuple[Policy, ...]:
        found = self._bench.fastest(self._budget)
        return () if found is None else found.policies

    def _effects(self, frame: tuple[Policy, ...]) -> Effects | None:
        """Returns the effects of the options on top of a combination.

        They are measured on top of those of its policies that are applied before modules are chosen: a later one, such
        as for the optimizer, changes the bytes that are live anyway, not what an option frees.
        """
        first = tuple(policy for policy in frame if isinstance(policy, self._before))
        if first not in self._measured:
            self._measured[first] = measure_effects(self._bench, first, self._options, self._budget)
        effects = self._measured[first]
        if effects is None or first == frame:
            return effects
        live = live_at(self._bench.steps_under(first)[0], self._bench.steps_under(frame)[0], effects.moments)
        if live is None:
            return measure_effects(self._bench, frame, self._options, self._budget)
        return dataclasses.replace(effects, live=live)

    def _fits(self, one: Candidate | None) -> bool:
        return one is not None and self._bench.fits(one, self._budget)

    def _trim(self, frame: tuple[Policy, ...], option: Option) -> None:
        """Finds the fewest of an option's modules that fit, from the first on."""

        def first_fit(count: int) -> bool:
            return self._fits(self._bench.try_plan(*frame, *option.make(option.members[:count])))

        count = self._least(0, len(option.members), first_fit)  # all of them fit, as predicted
        self._bench.try_plan(*frame, *option.make(option.group.pattern_for(option.members[:count])))


def _exchanged(plan: tuple[Policy, ...], policy: Policy, other: Policy) -> tuple[Policy, ...]:
    return tuple(other if each == policy else each for each in plan)


def _lowest(effects: Effects) -> Ints:
    """Returns the columns of options, each for all of its modules, that together lead to the lowest peak found.

    Options are added while they lower it, those first that lower it most.
    """
    chosen = np.empty(0, dtype=np.int64)
    peak = effects.peak(chosen)
    while True:
        best = chosen
        taken = {effects.modules[column] for column in chosen.tolist()}
        for row in range(len(effects.options)):
            columns = effects.columns_of(row)
            if are_apart(effects.options[row].members, taken):
                together = np.append(chosen, columns)
                if effects.peak(together) < peak:
                    best, peak = together, effects.peak(together)
        if len(best) == len(chosen):
            return chosen
        chosen = best
