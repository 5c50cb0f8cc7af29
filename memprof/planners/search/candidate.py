"""A replayed plan and its predicted results, and errors of such results measured by runs and dry runs of this job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from memprof.policies.base import NUMERICS, SOURCES, Policy
from memprof.policies.plan.interval import Interval, interval_of
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.several_steps import NO_DRY_STEPS, DrySteps
from memprof.replay.live import fullest_of, live_bytes, live_bytes_by_category
from memprof.trace.schema import NONE
from memprof.trace.step import Step


@dataclass(frozen=True)
class Candidate:
    """A plan and the numbers of the steps under it.

    Attributes:
        policies: Its policies, in their order.
        peak_bytes: Peak allocated bytes, in the step with the highest peak.
        step_time_us: Duration of the step that plans are chosen on.
        peak_phase: Phase of the peak.
        peak_module: Module that runs at the peak, "" outside of modules.
        peak_op: Operator that runs at the peak.
        categories: Bytes at the peak, by category.
        peak_step: Number of the step with the peak.
        interval: Bounds of the peak, from the errors of its policies on other jobs.
        host_bytes: Pinned host memory that its copies take; 0 unless the search limits it.
        reserved_bytes: Modelled peak of what the allocator reserves; 0 unless the search counts it and the plan nearly
            fits.
        words: The effect of each policy on the job's numbers, of NUMERICS.
    """

    policies: tuple[Policy, ...]
    peak_bytes: int
    step_time_us: float
    peak_phase: str
    peak_module: str
    peak_op: str
    categories: dict[str, int] = field(default_factory=dict, compare=False)
    peak_step: int = -1
    interval: Interval = field(default=Interval(0, 0), compare=False)
    host_bytes: int = field(default=0, compare=False)
    reserved_bytes: int = field(default=0, compare=False)
    words: tuple[str, ...] = field(default=(), compare=False)

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return Plan(self.policies)

    @cached_property
    def settings(self) -> int:
        """How many settings its description names: policies, ranges of modules, and operators that are kept."""
        return 1 + len(re.findall(r"[,(+]", self.plan.describe()))

    @property
    def numerics(self) -> str:
        """Its effect on the job's numerics: the strongest of its policies' effects."""
        return max(self.words, key=NUMERICS.index, default=NUMERICS[0])

    @property
    def source(self) -> str:
        """The source of its numbers: the least certain among its policies."""
        return max((policy.source for policy in self.policies), key=SOURCES.index, default=SOURCES[0])


def candidate_of(
    policies: tuple[Policy, ...],
    recorded: Sequence[Step],
    predicted: Sequence[Step],
    fullest: Sequence[Step],
    dry_steps: DrySteps = NO_DRY_STEPS,
) -> Candidate:
    """Builds a candidate from predicted steps.

    Args:
        policies: The policies.
        recorded: The steps as recorded; the first is the one that plans are chosen on.
        predicted: The steps under the policies.
        fullest: The same with unknown sizes at their maximum.
        dry_steps: Steps from dry runs, from which the predicted ones were made.
    """
    step = fullest_of(predicted)
    during = live_bytes(step).during
    peak = int(np.argmax(during))
    module = int(step.ops.module_id[peak])
    return Candidate(
        policies=policies,
        peak_bytes=int(during[peak]),
        step_time_us=float(predicted[0].duration_us),
        peak_phase=str(step.ops.phase[peak]),
        peak_module=str(step.modules.name[module]) if module != NONE else "",
        peak_op=str(step.ops.name[peak]),
        categories={name: int(values[peak]) for name, values in live_bytes_by_category(step).items() if values[peak]},
        peak_step=step.number,
        interval=interval_of(policies, recorded, predicted, fullest, dry_steps),
        words=tuple(each.numerics_in(recorded[0]) for each in policies),
    )


@dataclass(frozen=True)
class SeenErrors:
    """Prediction errors by kinds of policies.

    The error of one policy is expected of every plan that contains it; the error of a combination, of every plan that
    contains all of it. Other policies keep their predictions.

    Attributes:
        errors: Kinds of policies of each plan tried, and the bytes by which it exceeded its prediction.
    """

    errors: tuple[tuple[frozenset[str], int], ...] = ()

    def expected(self, policies: Iterable[Policy]) -> int:
        """Returns the bytes by which a plan is expected to exceed its prediction; 0 where unknown."""
        if not self.errors:
            return 0
        kinds = frozenset(kinds_of(policies))
        return max((error for tried, error in self.errors if tried <= kinds), default=0)

    def with_error(self, policies: Iterable[Policy], error_bytes: int) -> SeenErrors:
        """Returns the errors with those of another plan added.

        Args:
            policies: The plan's.
            error_bytes: Measured minus predicted bytes; for plans of the same kinds the largest counts.
        """
        kinds = frozenset(kinds_of(policies))
        known = dict(self.errors)
        known[kinds] = max(known.get(kinds, 0), error_bytes)
        return SeenErrors(tuple(known.items()))


def kinds_of(policies: Iterable[Policy]) -> tuple[str, ...]:
    """Returns the kinds of a plan, equal for plans that differ only in the modules or numbers they choose."""
    return tuple(
        policy.name if hasattr(policy, "modules") else re.sub(r"\d+", "#", policy.describe()) for policy in policies
    )
