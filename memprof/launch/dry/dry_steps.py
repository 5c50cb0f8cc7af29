"""Dry-runs a job under the frames of a search's plans, so that the search continues from those steps."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from memprof.analysis.plans.frames import frames_to_dry_run, steps_of_frame
from memprof.analysis.plans.suggest import Suggestion
from memprof.errors import BadInputError, InconclusiveError, UsageError
from memprof.launch.dry.dry_outcome import DryOutcome
from memprof.launch.dry.job_server import DryRequest, DryRuns
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.several_steps import DrySteps
from memprof.trace.files.spool import RAN_EAGERLY
from memprof.trace.step import Step
from memprof.trace.store import Trace


def dry_run_frames(found: Suggestion, most: int, run: DryRuns) -> DrySteps:
    """Dry-runs a job under the frames that a search's plans need.

    Where that is impossible, or the dry run has no step on the recorded inputs, the modelled steps remain.

    Args:
        found: The search result.
        most: Number of its plans whose frames are dry-run.
        run: Makes dry runs of the job.

    Returns:
        The steps to search again from; empty if the search has nothing to gain.
    """
    frames = frames_to_dry_run(found, most)
    with tempfile.TemporaryDirectory(prefix="memprof-dry-") as folder:
        paths = [Path(folder, f"{number}.memprof") for number in range(len(frames))]
        outcomes = run([DryRequest(Plan(frame), path) for frame, path in zip(frames, paths, strict=True)])
        learned: dict[tuple[Policy, ...], tuple[Step, ...]] = {}
        for frame, path, outcome in zip(frames, paths, outcomes, strict=True):
            steps = steps_at(frame, path, outcome, found)[1]
            if steps is not None:
                learned[frame] = steps
    return learned


def steps_at(
    policies: Sequence[Policy], path: Path, outcome: DryOutcome, found: Suggestion
) -> tuple[DryOutcome, tuple[Step, ...] | None]:
    """Returns the steps of a dry run that was written to a file.

    Args:
        policies: The policies that the job was dry-run under.
        path: The file.
        outcome: The outcome of the dry run.
        found: The search on the recorded job.

    Returns:
        The outcome, with the reason if there are no steps; and a step for each recorded one, None without.
    """
    if outcome.peak_bytes is None:
        return outcome, None
    try:
        trace = Trace.open(path, found.manifest.rank)
        eager = next((note for note in trace.manifest.notes if RAN_EAGERLY in note), "")
        if eager:
            return DryOutcome(None, eager), None
        return outcome, steps_of_frame(policies, found.basis, trace, found.manifest)
    except (BadInputError, InconclusiveError, UsageError) as error:
        return DryOutcome(None, str(error)), None
