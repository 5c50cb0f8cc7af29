"""Chooses modules: which run again in backward, wholly or in part, and whose saved tensors are offloaded."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.planners.search.candidate import Candidate
from memprof.planners.search.effects import Maker, Option, find_options
from memprof.planners.search.groups import Group
from memprof.planners.search.measure import measure_effects
from memprof.planners.search.mixture import Mixture
from memprof.planners.search.workbench import Workbench, rank
from memprof.policies.base import Policy
from memprof.policies.registry import policy_types

#: Number of fitting choices for whole groups that are trimmed, fastest first.
_MOST_TRIMMED = 2


class Selection:
    """Chooses modules on top of a combination of other policies, so that the step fits."""

    def __init__(self, bench: Workbench, allowed: set[str], budget_bytes: int) -> None:
        """Prepares a search.

        Args:
            bench: Replays plans.
            allowed: Names of allowed policies.
            budget_bytes: Most bytes that may be allocated at once.
        """
        self._bench = bench
        self._budget = budget_bytes
        self._options = find_options(bench.step, [kind for kind in policy_types() if kind.name in allowed])

    def choose(self, frame: tuple[Policy, ...]) -> None:
        """Tries choices on top of a combination; the results are in the bench's archive.

        The fastest is a mixture; single policies for some members of one group are simpler to read.
        """
        effects = measure_effects(self._bench, frame, self._options)
        if effects is None:
            return
        mixture = Mixture(self._bench, frame, effects, self._budget).search()
        whole = [(self._try(frame, option), option) for option in self._options]
        done = [(found, option) for found, option in whole if found is not None]
        fitting = sorted((one for one in done if self._fits(one[0])), key=lambda one: rank(one[0]))
        for _, option in fitting[:_MOST_TRIMMED]:
            self._trim(frame, option)
        if mixture is None and not fitting:
            self._join(frame, done)

    def _fits(self, one: Candidate | None) -> bool:
        return one is not None and self._bench.needed(one) <= self._budget

    def _try(self, frame: tuple[Policy, ...], option: Option) -> Candidate | None:
        return self._bench.try_plan(*frame, option.make(option.group.pattern_for(option.members)))

    def _trim(self, frame: tuple[Policy, ...], option: Option) -> None:
        """Finds the fewest members that fit, from either end."""
        for order in (option.members, option.members[::-1]):
            low, high = 0, len(order)  # the first does not fit, or has not been tried; the second does
            while high - low > 1:
                middle = (low + high) // 2
                if self._fits(self._bench.try_plan(*frame, option.make(order[:middle]))):
                    high = middle
                else:
                    low = middle

    def _join(self, frame: tuple[Policy, ...], done: list[tuple[Candidate, Option]]) -> None:
        """Adds groups to the option that frees most, with the same settings, until the step fits."""
        if not done:
            return
        best, first = min(done, key=lambda one: (one[0].peak_bytes, rank(one[0])))
        groups = {option.group.pattern: option.group for _, option in done}
        chosen = [first.group]
        while not self._fits(best):
            more = [group for group in groups.values() if all(group.is_apart_from(other) for other in chosen)]
            joined = [(self._together(frame, first.make, [*chosen, group]), group) for group in more]
            known = [(found, group) for found, group in joined if found is not None]
            if not known:
                return
            best, group = min(known, key=lambda one: (one[0].peak_bytes, rank(one[0])))
            chosen.append(group)

    def _together(self, frame: tuple[Policy, ...], maker: Maker, groups: Sequence[Group]) -> Candidate | None:
        """Tries several groups whole."""
        names = [group.pattern_for(group.members) for group in groups]
        return self._bench.try_plan(*frame, maker(tuple(name for part in names for name in part)))
