"""Dry-runs a job under policies that are best not modelled, so that a search continues from those steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from memprof.analysis.plans.dry_steps import policies_to_dry_run, steps_of_dry_run
from memprof.analysis.plans.suggest import Suggestion
from memprof.errors import BadInputError, InconclusiveError, PolicyError, UsageError
from memprof.launch.dry.dry_job import DryOutcome
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.several_steps import DrySteps
from memprof.trace.step import Step
from memprof.trace.store import Trace


def dry_run_steps(found: Suggestion, most: int, run: Callable[[Plan, Path], DryOutcome]) -> DrySteps:
    """Dry-runs a job under each policy of a search's plans that is best not modelled.

    Where that is impossible, or the dry run has no step on the recorded inputs, the modelled steps remain.

    Args:
        found: The search result.
        most: Number of its plans that will be checked.
        run: Dry-runs the job under a plan, and writes the recording to a path.

    Returns:
        The steps to search again from; empty if the search has nothing to gain.
    """
    learned: dict[tuple[Policy, ...], tuple[Step, ...]] = {}
    for policy in policies_to_dry_run(found, most):
        with tempfile.TemporaryDirectory(prefix="memprof-dry-") as folder:
            path = Path(folder, "dry.memprof")
            if run(Plan((policy,)), path).peak_bytes is None:
                continue
            try:
                steps = steps_of_dry_run(policy, found.basis, Trace.open(path, found.manifest.rank))
            except (BadInputError, InconclusiveError, PolicyError, UsageError):  # the model remains
                continue
        if steps is not None:
            learned[(policy,)] = steps
    return learned
