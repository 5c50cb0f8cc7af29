"""Dry-runs a job under the frames of a search's plans, so that the search continues from those steps."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.frames import steps_of_frame
from memprof.errors import BadInputError, InconclusiveError, UsageError
from memprof.launch.dry.dry_outcome import DryOutcome
from memprof.launch.dry.job_server import DryRequest, DryRuns
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.several_steps import DrySteps, Refusals
from memprof.trace.files.spool import RAN_EAGERLY
from memprof.trace.manifest import Manifest
from memprof.trace.step import Step
from memprof.trace.store import Trace


def dry_run_frames(
    frames: Sequence[tuple[Policy, ...]], basis: Basis, recording: Manifest, run: DryRuns
) -> tuple[DrySteps, Refusals]:
    """Dry-runs a job under frames.

    Where that is impossible, or the dry run has no step on the recorded inputs, the modelled steps remain.

    Args:
        frames: The frames.
        basis: The steps as recorded.
        recording: The recording's manifest.
        run: Makes dry runs of the job.

    Returns:
        The steps of those that could be dry-run, and why the job refused others.
    """
    with tempfile.TemporaryDirectory(prefix="memprof-dry-") as folder:
        paths = [Path(folder, f"{number}.memprof") for number in range(len(frames))]
        outcomes = run([DryRequest(Plan(frame), path) for frame, path in zip(frames, paths, strict=True)])
        learned: dict[tuple[Policy, ...], tuple[Step, ...]] = {}
        for frame, path, outcome in zip(frames, paths, outcomes, strict=True):
            steps = steps_at(frame, path, outcome, basis, recording)[1]
            if steps is not None:
                learned[frame] = steps
    refused = zip(frames, outcomes, strict=True)
    return learned, {frame: outcome.reason for frame, outcome in refused if outcome.is_refused}


def steps_at(
    policies: Sequence[Policy], path: Path, outcome: DryOutcome, basis: Basis, recording: Manifest
) -> tuple[DryOutcome, tuple[Step, ...] | None]:
    """Returns the steps of a dry run that was written to a file.

    Args:
        policies: The policies that the job was dry-run under.
        path: The file.
        outcome: The outcome of the dry run.
        basis: The steps as recorded.
        recording: The recording's manifest.

    Returns:
        The outcome, and one step per recorded step; None instead of the steps if the outcome says why there are none.
    """
    if outcome.peak_bytes is None:
        return outcome, None
    try:
        trace = Trace.open(path, recording.rank)
        eager = next((note for note in trace.manifest.notes if RAN_EAGERLY in note), "")
        if eager:
            return DryOutcome(None, eager), None
        return outcome, steps_of_frame(policies, basis, trace, recording)
    except (BadInputError, InconclusiveError, UsageError) as error:
        return DryOutcome(None, str(error)), None
