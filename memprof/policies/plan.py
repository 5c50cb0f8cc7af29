"""A plan: policies in their order, and what they are predicted to lead to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memprof.policies.base import SOURCES, Policy
from memprof.policies.prediction import Prediction
from memprof.policies.registry import policy_types
from memprof.policies.together import require_composable
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.job import Job


@dataclass(frozen=True)
class Plan:
    """Policies, and what they are predicted to lead to.

    Attributes:
        policies: The policies in their fixed order (see ``registry.policy_types``), whatever order they were given in.
        prediction: What the step will be, None before anybody predicted it.
    """

    policies: tuple[Policy, ...] = ()
    prediction: Prediction | None = None

    def __post_init__(self) -> None:
        """Puts the policies in order; those of one kind stay as given."""
        kinds = policy_types()
        # A policy may be a subclass of one of ours, whose place it takes.
        ordered = sorted(self.policies, key=lambda policy: [isinstance(policy, kind) for kind in kinds].index(True))
        object.__setattr__(self, "policies", tuple(ordered))

    def with_policies(self, more: Iterable[Policy]) -> Plan:
        """Returns the plan with more policies, and without a prediction where there are any."""
        added = tuple(more)
        return Plan((*self.policies, *added)) if added else self

    def transform(self, step: Step) -> Step:
        """Rewrites a recorded step through all policies.

        Raises:
            PolicyError: A policy does not fit the step, or another policy.
        """
        require_composable(self.policies)
        for policy in self.policies:
            step = policy.transform(step)
        return step

    def predict(self, step: Step, *, trace: str = "") -> tuple[Plan, Step]:
        """Predicts the step this plan leads to.

        Args:
            step: The recorded step.
            trace: What the recording is called.

        Returns:
            The plan with its prediction, and the predicted step.

        Raises:
            PolicyError: A policy does not fit the step.
        """
        predicted = self.transform(step)
        prediction = Prediction.of(step, predicted, trace=trace, how=self.source)
        return replace(self, prediction=prediction), predicted

    def apply(self, job: Job) -> None:
        """Applies every policy to a job, all or none.

        Raises:
            PolicyError: A policy does not fit; those before it have been taken back.
        """
        require_composable(self.policies)
        try:
            for policy in self.policies:
                policy.apply(job)
        except BaseException:
            job.undo()
            raise

    def start(self) -> None:
        """Does what must happen in the job's process before the job's own code runs."""
        for policy in self.policies:
            policy.start()

    def environment(self) -> dict[str, str]:
        """Returns the environment variables the job needs from its start."""
        return {name: value for policy in self.policies for name, value in policy.environment().items()}

    @property
    def source(self) -> str:
        """The least sure of the ways in which its policies know; that of replay where there are none."""
        return max((policy.source for policy in self.policies), key=SOURCES.index, default=SOURCES[0])

    def describe(self) -> str:
        """Says in a few words what the plan does."""
        return ", ".join(policy.describe() for policy in self.policies) or "no policy"
