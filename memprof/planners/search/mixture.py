"""Chooses for each module whether its tensors are saved, kept in part, recomputed or moved: the cheapest mixture.

Bytes and times of single choices are measured by replay and added up to find a mixture (``knapsack``). The mixture is
then replayed as a whole, and what the sum got wrong at each moment is corrected for the next one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import numpy as np

from memprof.planners.search.candidate import Candidate
from memprof.planners.search.effects import Effects, changed_at_random, in_order, shorter
from memprof.planners.search.knapsack import Knapsack
from memprof.planners.search.measure import live_at
from memprof.planners.search.workbench import SAME_TIME, Workbench, rank
from memprof.policies.base import Policy
from memprof.replay.live import live_bytes
from memprof.trace.schema import Floats, Ints

#: Mixtures replayed for one combination of other policies, before single choices are improved.
_MOST_ROUNDS = 6
#: Single choices replaced by cheaper ones at the end, and the replacements tried for each.
_MOST_IMPROVED, _MOST_TRIED = 8, 3
#: Mixtures of fewer settings replayed in the end.
_MOST_SHORTENED = 40
#: Share of the budget by which bytes added up, or copies that wait for others, may be too high.
_OFF = 0.25
#: Share of the step time that a plan may take longer if it consists of fewer options, or has its choices in order.
_SIMPLER, _IN_ORDER = 1e-3, 1e-3
#: Share of the step time by which a solution of the knapsack may miss the optimum.
_SLACK = 5e-4


class Mixture:
    """Searches mixtures on top of one combination of other policies.

    Attributes:
        frame: The combination.
        is_hopeless: Whether the optimizer's update, which no choice of modules changes, exceeds the budget.
    """

    def __init__(self, bench: Workbench, frame: tuple[Policy, ...], effects: Effects, budget_bytes: int) -> None:
        self._bench = bench
        self.frame = frame
        self._effects = effects
        self._budget = budget_bytes
        self._knapsack = Knapsack(effects, _SLACK * bench.step.duration_us)
        if bench.most_host_bytes is not None:
            taken = bench.try_plan(*frame)
            self._knapsack.host_room = bench.most_host_bytes - (0 if taken is None else taken.host_bytes)
        self._step = bench.steps_under(frame)[0]
        self._base = bench.steps_under(effects.frame)[0]
        self._live: Floats = effects.live.astype(np.float64)
        self._margin = 0.0
        self._cost_us = np.maximum(effects.cost_us, 0.0) + 1e-3
        self._best: tuple[Candidate, Ints] | None = None
        self.is_hopeless = False

    def least_us(self) -> float:
        """Returns the step time if choices could be made in part, a lower bound as added up; infinite if none fits."""
        return self._step.duration_us + self._knapsack.relaxed_cost(self._cost_us, self._live - self._budget)

    def search(self, *, roughly: bool = False) -> Candidate | None:
        """Returns the fastest mixture found that fits, or roughly, the first; None if there is none."""
        best: tuple[Candidate, Ints] | None = None
        nearest: tuple[Candidate, Ints] | None = None
        seen: set[tuple[int, ...]] = set()
        whole = iter(self._whole_options())
        for _ in range(_MOST_ROUNDS):
            chosen = self._choose(self._live + self._margin - self._budget)
            if best is None and (chosen is None or tuple(chosen.tolist()) in seen):
                chosen = next(whole, None)
            if chosen is None or self._bench.is_late() or tuple(chosen.tolist()) in seen:
                break
            seen.add(tuple(chosen.tolist()))
            found = self._try(chosen)
            if found is None:
                if not self._ban(chosen):
                    break
                continue
            self.is_hopeless = self._peaks_in_update(found)
            if self.is_hopeless:
                break
            self._learn(chosen, found)
            if nearest is None or self._bench.needed(found) < self._bench.needed(nearest[0]):
                nearest = found, chosen
            if self._fits(found) and (best is None or rank(found) < rank(best[0])):
                best = found, chosen
            if best is not None and (
                roughly or best[0].step_time_us <= self.least_us() + _SLACK * self._step.duration_us
            ):
                break
        if best is None and nearest is not None:
            found = self._fitting_variant(nearest[0])
            best = (found, nearest[1]) if self._fits(found) else None
        if best is None or roughly:
            return None if best is None else best[0]
        self._best = self._improved(*best)
        return self._finished(*self._best)

    def refined(self, tries: int) -> Candidate | None:
        """Adds, removes and exchanges single choices at random, and keeps what is faster and fits.

        Args:
            tries: Number of plans to try.

        Returns:
            The fastest mixture found; None if ``search`` has found none.
        """
        if self._best is None:
            return None
        best, chosen = self._best
        draw = random.Random(0)
        for _ in range(tries):
            changed = changed_at_random(self._effects, chosen, draw)
            found = self._try(changed)
            if found is not None and self._fits(found) and rank(found) < rank(best):
                best, chosen = found, changed
        self._best = best, chosen
        return self._finished(best, chosen)

    def shorten(self) -> None:
        """Replays changes of the best mixture, and goes on from those of fewer settings that fit and are as fast."""
        if self._best is None:
            return
        best, chosen = self._best
        fewest, proposed = best.settings, self._shorter(chosen)
        for _ in range(_MOST_SHORTENED):
            if (changed := next(proposed, None)) is None:
                break
            found = self._try(changed)
            if found is None or not self._fits(found) or found.settings >= fewest:
                continue
            if found.step_time_us <= best.step_time_us * SAME_TIME:
                fewest, proposed = found.settings, self._shorter(changed)

    def _shorter(self, chosen: Ints) -> Iterator[Ints]:
        """Yields columns near some chosen ones: other options for their modules, layers in a row, fewer options."""
        yield from shorter(self._effects, chosen)
        option_of = self._effects.option_of
        options = np.unique(option_of[chosen])
        for option in options.tolist() if len(options) > 1 else ():
            cost_us = np.where(np.isin(option_of, options[options != option]), self._cost_us, np.inf)
            found = self._knapsack.choose(cost_us, self._live + self._margin - self._budget)
            if found is not None:
                yield found

    def _finished(self, found: Candidate, chosen: Ints) -> Candidate:
        """Returns a mixture with its choices in order and the best settings of its policies."""
        return self._with_variants(self._tidied(found, chosen))

    def _choose(self, needed: Floats) -> Ints | None:
        """Returns the cheapest columns of few options; of all, where these are not enough or take longer."""
        chosen = self._knapsack.choose(self._cost_us, needed)
        if chosen is None or not len(chosen):
            return chosen
        option_of = self._effects.option_of
        options, counts = np.unique(option_of[chosen], return_counts=True)
        cost_us = np.where(np.isin(option_of, options), self._cost_us, np.inf)
        most_us = self._knapsack.relaxed_cost(cost_us, needed) + _SIMPLER * self._step.duration_us
        has_fewer = False
        for option in options[np.argsort(counts, kind="stable")].tolist():
            fewer_us = np.where(option_of == option, np.inf, cost_us)
            if self._knapsack.relaxed_cost(fewer_us, needed) <= most_us:
                cost_us, has_fewer = fewer_us, True
        simpler = self._knapsack.choose(cost_us, needed) if has_fewer else None
        if simpler is None:
            return chosen
        longer_us = float(self._cost_us[simpler].sum() - self._cost_us[chosen].sum())
        return chosen if longer_us > _SIMPLER * self._step.duration_us else simpler

    def _whole_options(self) -> list[Ints]:
        """Returns the columns of each option that could fit for all modules if adding up is off, cheapest first."""
        columns = map(self._effects.columns_of, range(len(self._effects.options)))
        near = [each for each in columns if self._effects.peak(each) <= self._budget * (1 + _OFF)]
        return sorted(near, key=lambda each: float(self._cost_us[each].sum()))

    def _peaks_in_update(self, found: Candidate) -> bool:
        """Returns whether a plan exceeds the budget in the optimizer's update, by as much as without its choices."""
        is_here = found.peak_phase == "optimizer" and found.peak_step == self._step.number
        if found.peak_bytes <= self._budget or not is_here:
            return False
        during = live_bytes(self._step).during[self._step.ops.phase == "optimizer"]
        return found.peak_bytes >= int(during.max(initial=0))

    def _fits(self, found: Candidate) -> bool:
        return self._bench.fits(found, self._budget)

    def _try(self, chosen: Ints) -> Candidate | None:
        found = self._bench.try_plan(*self.frame, *self._effects.policies(chosen))
        return None if found is None else self._bench.counted(found)

    def _ban(self, chosen: Ints) -> bool:
        """Bans the option of a refused mixture with the fewest modules; returns whether others are left."""
        options, counts = np.unique(self._effects.option_of[chosen], return_counts=True)
        if len(options) < 2:
            return False
        self._cost_us[self._effects.option_of == options[np.argmin(counts)]] = np.inf
        return True

    def _learn(self, chosen: Ints, found: Candidate) -> None:
        """Takes over what adding up got wrong: the bytes at each moment, and how long copies wait for each other."""
        policies = (*self.frame, *self._effects.policies(chosen))
        live = live_at(self._base, self._bench.steps_under(policies)[0], self._effects.moments)
        if live is None:  # only how far the peak is off is known
            self._margin += self._bench.needed(found) - self._budget
        else:
            self._live = live + self._effects.freed[:, chosen].sum(axis=1)
            margin = float(self._bench.needed(found) - live.max())
            # What the allocator reserves beyond live bytes is only known of plans near the budget.
            self._margin = margin if self._bench.is_counted(found) else max(self._margin, margin)
        if self._knapsack.host_room is not None:
            self._knapsack.host_room -= self._bench.host_excess(found)
        copy_us = self._effects.copy_us
        total_us = float(copy_us[chosen].sum())
        excess_us = found.step_time_us - self._step.duration_us - float(self._cost_us[chosen].sum())
        if total_us and excess_us > 0:
            self._cost_us += excess_us * copy_us / total_us

    def _improved(self, best: Candidate, chosen: Ints) -> tuple[Candidate, Ints]:
        """Replaces single choices by cheaper ones for the same module, or by none, while the plan still fits."""
        for _ in range(_MOST_IMPROVED):
            for column, other in islice(self._cheaper(chosen, self._budget - self._bench.needed(best)), _MOST_TRIED):
                changed = np.array(sorted({*chosen.tolist(), other} - {column, -1}), dtype=np.int64)
                found = self._try(changed)
                if found is not None and self._fits(found) and rank(found) < rank(best):
                    best, chosen = found, changed
                    break
            else:
                break
        return best, chosen

    def _cheaper(self, chosen: Ints, spare: int) -> list[tuple[int, int]]:
        """Lists replacements that should still fit, as chosen column and other column, most time saved first.

        The other column is -1 for none.
        """
        effects = self._effects
        at = np.argmax(self._live - effects.freed[:, chosen].sum(axis=1))
        freed = np.append(effects.freed[at], 0.0)  # the last stands for -1
        cost_us = np.append(self._cost_us, 0.0)
        modules = np.array(effects.modules, dtype=np.object_)
        found: list[tuple[float, int, int]] = []
        for column in chosen.tolist():
            same = np.flatnonzero((modules == modules[column]) & np.isfinite(self._cost_us))
            for other in (-1, *same.tolist()):
                saved_us = float(cost_us[column] - cost_us[other])
                if other != column and saved_us > 0 and freed[column] - freed[other] <= spare:
                    found.append((-saved_us, column, other))
        return [(column, other) for _, column, other in sorted(found)]

    def _tidied(self, best: Candidate, chosen: Ints) -> Candidate:
        """Gives like choices to consecutive layers, those that free most to the first, if the plan then still fits."""
        found = self._try(in_order(self._effects, chosen))
        if found is None or not self._fits(found):
            return best
        return found if found.step_time_us <= best.step_time_us * (1 + _IN_ORDER) else best

    def _fitting_variant(self, found: Candidate) -> Candidate:
        """Returns a plan that is a little above the budget with a setting that makes it fit; itself if none does."""
        if self._fits(found) or self._bench.needed(found) > self._budget * (1 + _OFF):
            return found
        tried = [self._bench.try_plan(*changed) for changed in _variants(found.policies)]
        fitting = [one for one in tried if one is not None and self._fits(one)]
        return min(fitting, key=rank, default=found)

    def _with_variants(self, best: Candidate) -> Candidate:
        """Tries other settings of the policies that have variants."""
        for changed in _variants(best.policies):
            found = self._bench.try_plan(*changed)
            if found is not None and self._fits(found) and rank(found) < rank(best):
                return self._with_variants(found)
        return best


def _variants(policies: tuple[Policy, ...]) -> Iterator[tuple[Policy, ...]]:
    for policy in policies:
        for other in policy.variants:
            yield tuple(other if each is policy else each for each in policies)
