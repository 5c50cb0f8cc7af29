"""Replays plans on the steps of a recording, and caches the results."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from memprof.errors import InvariantError, PolicyError
from memprof.planners.search.candidate import Candidate, candidate_of
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan, contradiction, require_predictable
from memprof.policies.plan.several_steps import DrySteps, Refusals, host_bytes_under, split_dry_run, transform_all
from memprof.policies.registry import policy_types
from memprof.replay.live import fullest_of
from memprof.trace.step import Step

#: Number of cached steps under plan prefixes, so that plans with equal prefixes share the work.
_MOST_STEPS = 64
#: Share of the budget by which a plan may exceed it for its reserved bytes to be modelled: the next one learns from it.
NEAR = 0.05
#: A plan is about as fast as another if it takes no longer than this many times its step time: then the shorter wins.
SAME_TIME = 1.01

#: Returns the most bytes that a device's allocator reserves for a plan, in the fullest of the steps under it.
ReservedBytes = Callable[[Plan, Step], int]


@dataclass(eq=False)
class Workbench:
    """Replays plans on recorded steps.

    Attributes:
        step: The recorded step that plans are chosen on.
        deadline: ``time.monotonic`` value after which nothing new is tried.
        report: Called with every replayed plan.
        archive: Every plan replayed so far, by its policies.
        refused: Inapplicable plans, with the reason.
        was_stopped: Whether the search stopped before it was complete.
        others: Other steps of the job, which a plan must fit as well.
        needed: Returns the bytes a plan needs.
        dry_steps: Steps from dry runs, which stand for predicted ones.
        most_host_bytes: Most bytes of pinned host memory that a plan may take; None for any.
        counts_host: Whether to count these bytes in any case.
        impossible: Why policies that change kernels cannot be applied; no plan that has all of one entry is tried.
        reserved: Returns what the allocator reserves for plans whose peak is about ``counted_bytes`` or less.
        counted_bytes: The budget in which reserved bytes must fit.
    """

    step: Step
    deadline: float
    report: Callable[[Candidate], None] = lambda _: None
    archive: dict[tuple[Policy, ...], Candidate] = field(default_factory=dict)
    refused: dict[tuple[Policy, ...], str] = field(default_factory=dict)
    was_stopped: bool = False
    others: tuple[Step, ...] = ()
    needed: Callable[[Candidate], int] = lambda one: one.interval.most_bytes
    dry_steps: DrySteps = field(default_factory=dict)
    most_host_bytes: int | None = None
    counts_host: bool = False
    impossible: Refusals = field(default_factory=dict)
    reserved: ReservedBytes | None = None
    counted_bytes: int = 0
    _steps: dict[tuple[int, tuple[Policy, ...], bool], tuple[Step, ...]] = field(default_factory=dict)

    def refusals_of(self, policies: tuple[Policy, ...]) -> Refusals:
        """Returns the entries of ``impossible`` that a plan has all policies of."""
        return {frame: reason for frame, reason in self.impossible.items() if set(frame) <= set(policies)}

    def is_late(self) -> bool:
        """Returns whether the deadline has passed."""
        if time.monotonic() >= self.deadline:
            self.was_stopped = True
        return self.was_stopped

    @staticmethod
    def key_of(policies: tuple[Policy, ...]) -> tuple[Policy, ...]:
        """Returns a plan's key in ``archive`` and ``refused``: its policies in their order."""
        return Plan(policies).policies

    def try_plan(self, *policies: Policy) -> Candidate | None:
        """Replays a plan on every step, once.

        Returns:
            The result; None where a policy does not apply, or the deadline has passed.
        """
        key = self.key_of(policies)
        known = self.archive.get(key)
        if known is not None or key in self.refused or (key and self.is_late()):
            return known
        if refusals := self.refusals_of(key):
            self.refused |= refusals
            return None
        try:
            require_predictable(key)
            steps = self.steps_under(key)
            fullest = self.steps_under(key, at_most=True) if any(policy.guesses for policy in key) else steps
            is_counted = self.counts_host or self.most_host_bytes is not None
            host = host_bytes_under(key, self.steps_under) if is_counted else 0
        except PolicyError as error:
            self.refused[key] = str(error)
            return None
        except InvariantError as error:  # one failing plan must not abort the search
            self.refused[key] = f"internal error of memprof: cannot predict this plan: {error}"
            return None
        found = candidate_of(key, (self.step, *self.others), steps, fullest, self.dry_steps)
        self.archive[key] = found = replace(found, host_bytes=host)
        self.report(found)
        return found

    def is_counted(self, one: Candidate) -> bool:
        """Returns whether ``needed`` is all that a plan needs, with reserved bytes where the budget counts them."""
        return self.reserved is None or one.reserved_bytes > 0

    def counted(self, one: Candidate) -> Candidate:
        """Returns a plan with its reserved bytes, where the budget counts them and its peak is near it or below."""
        one = self.archive.get(one.policies, one)
        return self.modelled(one) if self.needed(one) <= self.counted_bytes * (1 + NEAR) else one

    def modelled(self, one: Candidate) -> Candidate:
        """Returns a plan with its reserved bytes, where the budget counts them.

        They are modelled when they are first asked for, which takes longer than a replay does.
        """
        if self.reserved is None or self.is_counted(one):
            return one
        reserved_bytes = self.reserved(one.plan, fullest_of(self.steps_under(one.policies)))
        self.archive[one.policies] = found = replace(one, reserved_bytes=reserved_bytes)
        return found

    def steps_under(self, policies: tuple[Policy, ...], *, at_most: bool = False) -> tuple[Step, ...]:
        """Returns the steps under a plan, the one it is chosen on first.

        Raises:
            PolicyError: A policy does not apply to ``step``.
        """
        base, remaining = split_dry_run(Plan(policies).policies, (self.step, *self.others), self.dry_steps)
        return self._rewritten(base, remaining, at_most=at_most)

    def _rewritten(self, base: tuple[Step, ...], policies: tuple[Policy, ...], *, at_most: bool) -> tuple[Step, ...]:
        """Returns steps, recorded or dry-run, under policies; steps under the first of them are cached."""
        if not policies:
            return base
        at_most = at_most and any(policy.guesses for policy in policies)
        key = (id(base[0]), policies, at_most)  # the base lives as long as this object
        known = self._steps.pop(key, None)
        if known is None:
            before = self._rewritten(base, policies[:-1], at_most=at_most)
            known = transform_all(policies[-1], before, at_most=at_most)
        self._steps[key] = known  # most recently used last
        if len(self._steps) > _MOST_STEPS:
            self._steps.pop(next(iter(self._steps)))
        return known

    def fits(self, one: Candidate, budget_bytes: int) -> bool:
        """Returns whether a plan is within a budget, and its copies within the host's."""
        return self.may_fit(self.counted(one), budget_bytes)

    def may_fit(self, one: Candidate, budget_bytes: int) -> bool:
        """Returns the same as far as it is known, without reserved bytes where they were not modelled."""
        return self.needed(one) <= budget_bytes and not self.host_excess(one)

    def host_excess(self, one: Candidate) -> int:
        """Returns the bytes by which a plan's copies exceed the host's budget, 0 if they do not."""
        return 0 if self.most_host_bytes is None else max(one.host_bytes - self.most_host_bytes, 0)

    def fitting(self, budget_bytes: int) -> list[Candidate]:
        """Lists the plans within a budget, fastest first; ties by fewest policies."""
        return list(self._fitting(budget_bytes))

    def fastest(self, budget_bytes: int) -> Candidate | None:
        """Returns the first of the plans within a budget; None where there is none."""
        return next(self._fitting(budget_bytes), None)

    def _fitting(self, budget_bytes: int) -> Iterator[Candidate]:
        """Yields the plans within a budget; after the deadline only those known to fit, unless there is none."""
        plans = sorted((one for one in self.archive.values() if self.may_fit(one, budget_bytes)), key=rank)
        known = list(filter(self.is_counted, plans)) if time.monotonic() >= self.deadline else []
        for one in map(self.counted, known or plans):
            if self.may_fit(one, budget_bytes):
                yield one


def rank(one: Candidate) -> tuple[float, int, int, tuple[int, str]]:
    """Sort key of plans: fastest first, then fewest policies, then smallest peak, then shortest description."""
    words = one.plan.describe()
    return round(one.step_time_us, 3), len(one.policies), one.peak_bytes, (len(words), words)


def shortest(plans: Sequence[Candidate]) -> Candidate:
    """Returns the plan of the fewest settings among those about as fast as the fastest; of equal ones the first."""
    most_us = SAME_TIME * min(one.step_time_us for one in plans)
    return min((one for one in plans if one.step_time_us <= most_us), key=lambda one: one.settings)


def allowed_names(allow: tuple[str, ...], forbid: tuple[str, ...], default: tuple[str, ...]) -> set[str]:
    """Returns the names of the allowed policies.

    Raises:
        PolicyError: Unknown policy name.
    """
    known = {kind.name for kind in policy_types()}
    for name in (*allow, *forbid):
        if name not in known:
            raise PolicyError(f"unknown policy {name!r}: give one of {', '.join(sorted(known))}.")
    return (set(allow) or set(default)) - set(forbid)


#: Share of the step time within which combinations count as equally fast.
_ALIKE = 5e-3


def find_frames(bench: Workbench, allowed: set[str], *, world_size: int = 1) -> list[tuple[Policy, ...]]:
    """Combines the policies that apply to the step, each first tried alone.

    Args:
        bench: Replays plans; inapplicable ones stay there with the reason.
        allowed: Names of allowed policies.
        world_size: Number of ranks; shards are tried from two on.

    Returns:
        The combinations of policies that can be combined, the empty one among them; shortest steps first, by the sum of
        the policies' own times, and of about equal ones those of fewer policies.
    """
    alternatives = []
    for kind in policy_types():
        if kind.name in allowed:
            found = kind.candidates(bench.step, world_size=world_size)
            bench.refused |= {(policy,): reason for policy, reason in found.unsuitable.items()}
            alternatives.append([(), *((policy,) for policy in _fitting(bench, found.whole_step))])
    base = bench.archive[()].step_time_us
    single = [policy for options in alternatives for parts in options for policy in parts]
    extra = {policy: bench.archive[(policy,)].step_time_us - base for policy in single}
    products = (tuple(itertools.chain.from_iterable(parts)) for parts in itertools.product(*alternatives))
    frames = [frame for frame in products if not contradiction(frame)]
    alike = max(_ALIKE * base, 1e-9)
    return sorted(
        frames,
        key=lambda frame: (round((total := sum(extra[policy] for policy in frame)) / alike), len(frame), total),
    )


def _fitting(bench: Workbench, options: tuple[Policy, ...]) -> list[Policy]:
    """Tries each alone, and drops those that do not apply or change nothing."""
    base = bench.archive[()]
    found = [(option, bench.try_plan(option)) for option in options]
    # A policy that leaves the peak may help another; one that also leaves the step time is not worth combining.
    same = (base.peak_bytes, base.step_time_us)
    return [option for option, one in found if one is not None and (one.peak_bytes, one.step_time_us) != same]
