"""Replays plans on one recorded step, and remembers every one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from memprof.errors import InvariantError, PolicyError
from memprof.planners.space.tried import Tried, tried
from memprof.policies.base import Policy
from memprof.policies.plan import Plan
from memprof.policies.registry import policy_types
from memprof.trace.step import Step

#: Steps under a part of a plan that are kept, so that plans that begin alike share the work.
_MOST_STEPS = 64


@dataclass(eq=False)
class Workbench:
    """Replays plans on a recorded step.

    Attributes:
        step: The recorded step.
        deadline: Moment of ``time.monotonic`` from which on nothing new is tried.
        report: Called with every plan that was replayed.
        archive: Every plan replayed so far, by its policies.
        refused: Plans that do not fit the step, with the sentence that says why.
        was_stopped: Whether the search was ended before it was through.
    """

    step: Step
    deadline: float
    report: Callable[[Tried], None] = lambda _: None
    archive: dict[tuple[Policy, ...], Tried] = field(default_factory=dict)
    refused: dict[tuple[Policy, ...], str] = field(default_factory=dict)
    was_stopped: bool = False
    _steps: dict[tuple[Policy, ...], Step] = field(default_factory=dict)

    def is_late(self) -> bool:
        """Tells whether the time is up."""
        if time.monotonic() >= self.deadline:
            self.was_stopped = True
        return self.was_stopped

    def try_plan(self, *policies: Policy) -> Tried | None:
        """Replays a plan, once.

        Returns:
            What came of it; None where a policy does not fit, or the time is up.
        """
        key = Plan(policies).policies
        known = self.archive.get(key)
        if known is not None or key in self.refused or (key and self.is_late()):
            return known
        try:
            step = self.step_under(key)
        except PolicyError as error:
            self.refused[key] = str(error)
            return None
        except InvariantError as error:  # one plan that goes wrong must not take all others with it
            self.refused[key] = f"memprof cannot predict this plan, which is a fault of memprof: {error}"
            return None
        self.archive[key] = found = tried(key, step)
        self.report(found)
        return found

    def step_under(self, policies: tuple[Policy, ...]) -> Step:
        """Returns the step a plan leads to.

        Raises:
            PolicyError: A policy does not fit.
        """
        if not policies:
            return self.step
        known = self._steps.pop(policies, None)
        if known is None:
            known = policies[-1].transform(self.step_under(policies[:-1]))
        self._steps[policies] = known  # the one used last stands last
        if len(self._steps) > _MOST_STEPS:
            self._steps.pop(next(iter(self._steps)))
        return known

    def fitting(self, budget_bytes: int) -> list[Tried]:
        """Lists the plans within a budget, the fastest first; of equally fast ones the one with fewest policies."""
        inside = [one for one in self.archive.values() if one.peak_bytes <= budget_bytes]
        return sorted(inside, key=rank)


def rank(one: Tried) -> tuple[float, int, int, str]:
    """Orders plans: the fastest first, then the one with fewest policies, then the one with the least peak."""
    return one.step_time_us, len(one.policies), one.peak_bytes, one.plan.describe()


def allowed_names(allow: tuple[str, ...], forbid: tuple[str, ...], default: tuple[str, ...]) -> set[str]:
    """Returns the names of the policies that may be used.

    Raises:
        PolicyError: A name is none of a policy.
    """
    known = {kind.name for kind in policy_types()}
    for name in (*allow, *forbid):
        if name not in known:
            raise PolicyError(f"There is no policy {name!r}; there are {', '.join(sorted(known))}.")
    return (set(allow) or set(default)) - set(forbid)
