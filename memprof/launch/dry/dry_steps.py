"""Dry-runs a job under the frames of a search's plans, and keeps them for later searches of the same recording."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.frames import steps_of_frame
from memprof.errors import BadInputError, InconclusiveError, UsageError
from memprof.launch.consent import cache_folder
from memprof.launch.dry.dry_outcome import DryOutcome
from memprof.launch.dry.job_server import DryRequest, DryRuns
from memprof.launch.parent.settings import DryWindow
from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan
from memprof.policies.plan.several_steps import DrySteps, Refusals
from memprof.trace.files.private_file import make_private_folder, write_private
from memprof.trace.files.spool import RAN_EAGERLY
from memprof.trace.manifest import Manifest
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.version import __version__


def dry_run_frames(
    frames: Sequence[tuple[Policy, ...]], basis: Basis, recording: Manifest, run: DryRuns
) -> tuple[DrySteps, Refusals]:
    """Dry-runs a job under frames.

    Where that is impossible, or the dry run has no step on the recorded inputs, the modelled steps remain.

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


#: Bytes that all kept dry runs may take; the least recently used are removed first.
_MOST_BYTES = 1 << 30
#: Variables that differ between shells and change no job.
_OF_SHELLS = ("_", "COLUMNS", "LINES", "OLDPWD", "PPID", "PWD", "SHLVL", "TERM", "WINDOWID")
_OF_SESSIONS = ("SSH_", "TMUX", "XDG_", "DBUS_", "VSCODE_", "TERM_", "SLURM_JOB", "MEMPROF_")
#: Packages besides torch whose version decides what a dry run allocates: workspaces of convolutions.
_DECISIVE = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


class FrameCache:
    """The kept dry runs of one recording's job."""

    def __init__(self, digest: str, window: DryWindow, device: str) -> None:
        """Reads nothing yet.

        Args:
            digest: Identifies the recording; its job's files are unchanged.
            window: The steps of the dry runs.
            device: The simulated device; "" for the CPU.
        """
        self._folder = cache_folder()
        environment = {
            name: text
            for name, text in os.environ.items()
            if name not in _OF_SHELLS and not name.startswith(_OF_SESSIONS)
        }
        torch = importlib.metadata.version("torch")
        found = [str(each.version) for name in _DECISIVE for each in importlib.metadata.distributions(name=name)]
        cudnn = [*found, os.environ.get("MEMPROF_CUDNN", "")]
        job = [__version__, torch, cudnn, digest, window.skip, window.steps, device, sorted(environment.items())]
        self._job = hashlib.sha256(json.dumps(job).encode()).hexdigest()[:16]

    def has_any(self) -> bool:
        """Returns whether a dry run of the job is kept."""
        return next(self._folder.glob(f"{self._job}-*.json"), None) is not None

    def find(self, request: DryRequest) -> DryOutcome | None:
        """Returns the outcome of a kept dry run, and writes its recording to the requested path; None without one."""
        outcome, recording = self._paths(request)
        try:
            found = DryOutcome(**json.loads(outcome.read_text(encoding="utf-8")))
            if request.keep is not None:
                shutil.copyfile(recording, request.keep)
                os.utime(recording)
            os.utime(outcome)
        except (OSError, ValueError, TypeError):  # none, or of another version
            return None
        return replace(found, was_started=False)

    def keep(self, request: DryRequest, outcome: DryOutcome) -> None:
        """Keeps a dry run that has a peak."""
        if outcome.peak_bytes is None:
            return
        kept, recording = self._paths(request)
        with contextlib.suppress(OSError):  # a home that cannot be written, or is full: it is run again
            make_private_folder(self._folder)
            if request.keep is not None:
                shutil.copyfile(request.keep, recording)
            write_private(kept, json.dumps(asdict(outcome)))
            self._prune()

    def _paths(self, request: DryRequest) -> tuple[Path, Path]:
        plan = request.plan or Plan()
        text = format_plan(replace(plan, prediction=None, budget_bytes=None))
        name = f"{self._job}-{hashlib.sha256(text.encode()).hexdigest()}"
        return self._folder / f"{name}.json", self._folder / f"{name}.memprof"

    def _prune(self) -> None:
        files = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for path in files:
            total += path.stat().st_size
            if total > _MOST_BYTES:
                path.unlink(missing_ok=True)
