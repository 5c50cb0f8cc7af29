"""A plan: policies in their order that do not contradict each other, their predicted effect, and the budget."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memprof.errors import PolicyError
from memprof.policies.base import NUMERICS, SOURCES, Policy
from memprof.policies.plan.interval import Interval, TimeInterval, interval_of
from memprof.policies.plan.patterns import match_modules
from memprof.policies.plan.prediction import Prediction
from memprof.policies.plan.several_steps import NO_DRY_STEPS, DrySteps, steps_under
from memprof.policies.registry import policy_types
from memprof.policies.runtime.model_names import without_wrappers
from memprof.replay.live import fullest_of
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.runtime.job import Job


@dataclass(frozen=True)
class Plan:
    """Policies, their predicted effect, and the budget they are for.

    Attributes:
        policies: The policies in their fixed order (see ``registry.policy_types``), regardless of the order given.
        prediction: The predicted step, None without a prediction.
        budget_bytes: Maximum allocated bytes of a step; None without a budget.
        at_batch: The batch the plan is for, None for that of the recording.
        at_length: The sequence length the plan is for, None for that of the recording.
    """

    policies: tuple[Policy, ...] = ()
    prediction: Prediction | None = None
    budget_bytes: int | None = None
    at_batch: int | None = None
    at_length: int | None = None

    def __post_init__(self) -> None:
        """Sorts the policies; those of one kind keep their order."""
        kinds = policy_types()
        # A policy may be a subclass of one of ours, whose place it takes.
        ordered = sorted(self.policies, key=lambda policy: [isinstance(policy, kind) for kind in kinds].index(True))
        object.__setattr__(self, "policies", tuple(ordered))

    @property
    def interval(self) -> Interval | None:
        """The bounds of the predicted peak; None where unknown."""
        return None if self.prediction is None else self.prediction.interval

    @property
    def time_interval(self) -> TimeInterval | None:
        """The bounds of the predicted step time; None where unknown."""
        return None if self.prediction is None else self.prediction.time_interval

    def with_policies(self, more: Iterable[Policy]) -> Plan:
        """Returns the plan with more policies; drops its prediction if any are added."""
        added = tuple(more)
        return replace(self, policies=(*self.policies, *added), prediction=None) if added else self

    def with_patterns(self, convert: Callable[[str], str]) -> Plan:
        """Returns the plan with each module pattern of its policies converted."""
        known = ((policy, patterns_of(policy)) for policy in self.policies)
        return replace(self, policies=tuple(choosing(one, map(convert, own)) if own else one for one, own in known))

    def caveats(self, step: Step) -> tuple[str, ...]:
        """Returns what its policies change in a recorded step and in the job's loop, one sentence each."""
        found = [(each, text) for each in self.policies for text in (*each.changes(step), each.caveat) if text]
        return tuple(f"{each.name}: {text}." for each, text in found)

    def numerics_of(self, policy: Policy) -> str:
        """Returns the effect of one of its policies on the numbers of the job, as predicted; one of NUMERICS."""
        own = (
            [] if self.prediction is None else [e for e in self.prediction.changes if e.startswith(f"{policy.name}: ")]
        )
        return NUMERICS[-1] if own and own != [f"{policy.name}: {policy.caveat}."] else policy.numerics

    def transform(self, step: Step) -> Step:
        """Rewrites a recorded step through all policies.

        Raises:
            PolicyError: A policy does not fit the step, or another policy.
        """
        require_predictable(self.policies)
        for policy in self.policies:
            step = policy.transform(step)
        return step

    def predict(
        self, step: Step, others: Sequence[Step] = (), *, trace: str = "", dry_steps: DrySteps = NO_DRY_STEPS
    ) -> tuple[Plan, Step]:
        """Predicts the steps this plan leads to.

        Args:
            step: The recorded step; of several, the one with the highest peak.
            others: Other steps of the job.
            trace: Name of the recording.
            dry_steps: Steps from dry runs under some of the policies, to start from.

        Returns:
            The plan with its prediction, and the predicted step with the highest peak.

        Raises:
            PolicyError: A policy does not fit the step, or another policy.
        """
        require_predictable(self.policies)
        recorded: tuple[Step, ...] = (step, *others)
        predicted = steps_under(self.policies, recorded, dry_steps)
        interval = interval_of(self.policies, recorded, predicted, dry_steps=dry_steps)
        prediction = Prediction.of_steps(recorded, predicted, interval, trace=trace, how=self.source)
        prediction = replace(prediction, changes=self.caveats(step))
        return replace(self, prediction=prediction), fullest_of(predicted)

    def apply(self, job: Job) -> None:
        """Applies every policy to a job, all or none.

        Raises:
            PolicyError: A policy does not fit; those before it have been undone.
        """
        require_composable(self.policies)
        try:
            for policy in self.policies:
                policy.apply(job)
        except BaseException:
            job.undo()
            raise

    def start(self) -> None:
        """Runs the set-up of each policy in the job's process before the job's own code."""
        for policy in self.policies:
            policy.start()

    def environment(self) -> dict[str, str]:
        """Returns the environment variables the job needs from its start."""
        return {name: value for policy in self.policies for name, value in policy.environment().items()}

    @property
    def source(self) -> str:
        """The least accurate source among its policies; "replayed" without policies."""
        return max((policy.source for policy in self.policies), key=SOURCES.index, default=SOURCES[0])

    @property
    def at(self) -> str:
        """The size the plan is for in words, such as ``length 512``; "" for that of the recording."""
        sizes = (("batch", self.at_batch), ("length", self.at_length))
        return " and ".join(f"{what} {size}" for what, size in sizes if size is not None)

    def describe(self) -> str:
        """Returns a short description of the plan."""
        return ", ".join(policy.describe() for policy in self.policies) or "no policy"


def require_composable(policies: Sequence[Policy]) -> None:
    """Checks that no policy of a plan undoes what another needs.

    Raises:
        PolicyError: Two do; the message names both.
    """
    reason = contradiction(policies)
    if reason:
        raise PolicyError(reason)


def require_predictable(policies: Sequence[Policy]) -> None:
    """Checks that a plan can be applied, and that each policy can be predicted together with the others.

    Raises:
        PolicyError: Two contradict each other, or one was measured under another plan.
    """
    require_composable(policies)
    reason = next(filter(None, (policy.refusal_within(policies) for policy in policies)), "")
    if reason:
        raise PolicyError(reason)


def contradiction(policies: Sequence[Policy]) -> str:
    """Returns why policies cannot be combined on any model, a sentence that names two of them; "" where they can."""
    return next(filter(None, itertools.starmap(_of_pair, itertools.combinations(policies, 2))), "")


def _of_pair(first: Policy, second: Policy) -> str:
    updates_in_backward = bool(getattr(second, "in_backward", False))
    if updates_in_backward and first.name == "accumulate":
        return (
            "accumulate sums gradients over micro-batches, but step-in-backward uses each gradient as soon as it is "
            "complete: leave in_backward or accumulate out of the plan."
        )
    if updates_in_backward and first.name == "precision" and getattr(first, "dtype", "") == "fp16":
        return (
            "Loss scaling for fp16 checks gradients for overflow before the update, but step-in-backward has used them "
            "by then: write precision bf16, or leave in_backward out of the plan."
        )
    if getattr(first, "one_by_one", False) and (updates_in_backward or getattr(second, "state", "")):
        return (
            "swap updates one parameter at a time within step(), and the optimizer policy changes when or with which "
            "state it is updated: leave one_by_one, or in_backward and state, out of the plan."
        )
    if first.name == "compile" and second.name == "remat":
        return (
            "Operators that torch.compile has compiled are invisible to remat: leave one of the two out, or set a "
            "budget for the compiler itself with --compile."
        )
    return ""


def fitted(plan: Plan, names: set[str]) -> Plan:
    """Returns a plan with patterns for the model inside, converted from patterns for the wrapped model.

    Args:
        plan: The plan.
        names: Names of the modules of the model inside; one that is called ``module`` itself keeps its name.
    """
    return plan.with_patterns(
        lambda pattern: pattern if pattern.partition(".")[0] in names else without_wrappers(pattern)
    )


def plan_for(plan: Plan, model_type: str, names: Iterable[str]) -> Plan:
    """Translates a plan's module patterns to the model's own names.

    In a recording of several models, the name of a module begins with its model's type.

    Raises:
        PolicyError: A pattern matches no module of this model.
    """
    known = list(names)

    def own(pattern: str) -> str:
        head, _, rest = pattern.partition(".")
        found = rest if rest and head.partition("#")[0] == model_type else pattern
        match_modules([found], known)
        return found

    return Plan(fitted(plan, set(known)).with_patterns(own).policies, budget_bytes=plan.budget_bytes)


def patterns_of(policy: Policy) -> tuple[str, ...]:
    """Returns a policy's module patterns; none if it has no such setting."""
    patterns = getattr(policy, "modules", ())
    return patterns if isinstance(patterns, tuple) else ()


def choosing(policy: Policy, patterns: Iterable[str]) -> Policy:
    """Returns a policy that chooses modules, with other patterns."""
    changes: dict[str, Any] = {"modules": tuple(dict.fromkeys(patterns))}
    return replace(policy, **changes)  # type: ignore[type-var]  # every policy is a dataclass
