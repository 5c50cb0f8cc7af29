"""Chooses modules: which run again in backward, and whose saved tensors are offloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memprof.planners.search.candidate import Candidate
from memprof.planners.search.groups import Group
from memprof.planners.search.workbench import Workbench, rank
from memprof.policies.base import Policy
from memprof.policies.registry import policy_types

#: Number of fitting choices that are trimmed, fastest first.
_MOST_TRIMMED = 6

#: Builds the policy for some modules.
Maker = Callable[[tuple[str, ...]], Policy]


class Selection:
    """Chooses modules on top of a combination of other policies, so that the step fits."""

    def __init__(self, bench: Workbench, groups: Sequence[Group], allowed: set[str], budget_bytes: int) -> None:
        """Prepares a search.

        Args:
            bench: Replays plans.
            groups: The candidate groups.
            allowed: Names of allowed policies.
            budget_bytes: Most bytes that may be allocated at once.
        """
        self._bench = bench
        self._groups = groups
        self._budget = budget_bytes
        self._kinds = [kind for kind in policy_types() if kind.name in allowed]

    def choose(self, frame: tuple[Policy, ...]) -> None:
        """Tries choices on top of a combination; the results are in the bench's archive."""
        makers: list[tuple[Maker, Group]] = []
        for group in self._groups:
            for kind in self._kinds:
                makers += [(make, group) for make in kind.module_choices(self._bench.step, group.kinds)]
        whole = [(self._try(frame, maker, group), maker, group) for maker, group in makers]
        done = [(found, maker, group) for found, maker, group in whole if found is not None]
        fitting = sorted((one for one in done if self._fits(one[0])), key=lambda one: rank(one[0]))
        for _, maker, group in fitting[:_MOST_TRIMMED]:
            self._trim(frame, maker, group)
        if not fitting:
            self._join(frame, done)

    def _fits(self, one: Candidate | None) -> bool:
        return one is not None and self._bench.needed(one) <= self._budget

    def _try(self, frame: tuple[Policy, ...], maker: Maker, group: Group) -> Candidate | None:
        return self._bench.try_plan(*frame, maker(group.chosen(len(group.members))))

    def _trim(self, frame: tuple[Policy, ...], maker: Maker, group: Group) -> None:
        """Finds the fewest members that fit, from either end, and replaces the last one by parts of it."""
        members = group.members
        for order in (members, members[::-1]):
            low, high = 0, len(members)  # the first does not fit, or has not been tried; the second does
            while high - low > 1:
                middle = (low + high) // 2
                if self._fits(self._bench.try_plan(*frame, maker(order[:middle]))):
                    high = middle
                else:
                    low = middle
            last = order[high - 1]
            for part in self._groups:
                inside = tuple(name for name in part.members if name.startswith(last + "."))
                if inside:
                    self._bench.try_plan(*frame, maker((*order[: high - 1], *inside)))

    def _join(self, frame: tuple[Policy, ...], done: list[tuple[Candidate, Maker, Group]]) -> None:
        """Adds groups to the one that frees most until the step fits; then removes unneeded members."""
        if not done:
            return
        _, maker, first = min(done, key=lambda one: (one[0].peak_bytes, rank(one[0])))
        chosen = [first]
        best = self._try(frame, maker, first)
        while not self._fits(best):
            more = [group for group in self._groups if all(group.is_apart_from(other) for other in chosen)]
            joined = [(self._together(frame, maker, [*chosen, group]), group) for group in more]
            known = [(found, group) for found, group in joined if found is not None]
            if not known:
                return
            best, group = min(known, key=lambda one: (one[0].peak_bytes, rank(one[0])))
            chosen.append(group)
        for place, group in enumerate(chosen):
            low, high = 0, len(group.members)
            while high - low > 1:
                middle = (low + high) // 2
                if self._fits(self._together(frame, maker, chosen, place, middle)):
                    high = middle
                else:
                    low = middle
            if high < len(group.members):
                return

    def _together(
        self, frame: tuple[Policy, ...], maker: Maker, groups: Sequence[Group], place: int = -1, count: int = 0
    ) -> Candidate | None:
        """Tries several groups whole, but only ``count`` members of one."""
        names = [group.chosen(count if row == place else len(group.members)) for row, group in enumerate(groups)]
        return self._bench.try_plan(*frame, maker(tuple(name for part in names for name in part)))
