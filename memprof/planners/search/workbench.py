"""Replays plans on the steps of a recording, and remembers every one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from memprof.errors import InvariantError, PolicyError
from memprof.planners.search.tried import Candidate, candidate_of
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.several_steps import transform_all
from memprof.policies.registry import policy_types
from memprof.trace.step import Step

#: Steps under a part of a plan that are kept, so that plans that begin alike share the work.
_MOST_STEPS = 64


@dataclass(eq=False)
class Workbench:
    """Replays plans on recorded steps.

    Attributes:
        step: The recorded step that plans are chosen on.
        deadline: Moment of ``time.monotonic`` from which on nothing new is tried.
        report: Called with every plan that was replayed.
        archive: Every plan replayed so far, by its policies.
        refused: Plans that do not fit the step, with the sentence that says why.
        was_stopped: Whether the search was ended before it was through.
        others: Other steps of the job, which a plan has to fit as well.
        needed: Returns the bytes that a plan has to fit with.
    """

    step: Step
    deadline: float
    report: Callable[[Candidate], None] = lambda _: None
    archive: dict[tuple[Policy, ...], Candidate] = field(default_factory=dict)
    refused: dict[tuple[Policy, ...], str] = field(default_factory=dict)
    was_stopped: bool = False
    others: tuple[Step, ...] = ()
    needed: Callable[[Candidate], int] = lambda one: one.interval.most_bytes
    _steps: dict[tuple[tuple[Policy, ...], bool], tuple[Step, ...]] = field(default_factory=dict)

    def is_late(self) -> bool:
        """Tells whether the time is up."""
        if time.monotonic() >= self.deadline:
            self.was_stopped = True
        return self.was_stopped

    def try_plan(self, *policies: Policy) -> Candidate | None:
        """Replays a plan on every step, once.

        Returns:
            What came of it; None where a policy does not fit, or the time is up.
        """
        key = Plan(policies).policies
        known = self.archive.get(key)
        if known is not None or key in self.refused or (key and self.is_late()):
            return known
        try:
            steps = self._steps_under(key)
            fullest = self._steps_under(key, at_most=True) if any(policy.guesses for policy in key) else steps
        except PolicyError as error:
            self.refused[key] = str(error)
            return None
        except InvariantError as error:  # one plan that goes wrong must not take all others with it
            self.refused[key] = f"memprof cannot predict this plan, which is a fault of memprof: {error}"
            return None
        self.archive[key] = found = candidate_of(key, (self.step, *self.others), steps, fullest)
        self.report(found)
        return found

    def _steps_under(self, policies: tuple[Policy, ...], *, at_most: bool = False) -> tuple[Step, ...]:
        """Returns the steps that a plan leads to, the one it is chosen on first.

        Raises:
            PolicyError: A policy does not fit ``step``.
        """
        if not policies:
            return (self.step, *self.others)
        at_most = at_most and any(policy.guesses for policy in policies)
        known = self._steps.pop((policies, at_most), None)
        if known is None:
            known = transform_all(policies[-1], self._steps_under(policies[:-1], at_most=at_most), at_most=at_most)
        self._steps[policies, at_most] = known  # those used last stand last
        if len(self._steps) > _MOST_STEPS:
            self._steps.pop(next(iter(self._steps)))
        return known

    def fitting(self, budget_bytes: int) -> list[Candidate]:
        """Lists the plans within a budget, the fastest first; of equally fast ones the one with fewest policies."""
        inside = [one for one in self.archive.values() if self.needed(one) <= budget_bytes]
        return sorted(inside, key=rank)


def rank(one: Candidate) -> tuple[float, int, int, str]:
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
