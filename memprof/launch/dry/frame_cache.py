"""Dry runs of earlier commands, so that a second search of the same recording repeats none."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from memprof.launch.consent import cache_folder
from memprof.launch.dry.dry_outcome import DryOutcome
from memprof.launch.dry.job_server import DryRequest
from memprof.launch.parent.settings import DryWindow
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan
from memprof.trace.files.private_file import make_private_folder, write_private
from memprof.version import __version__

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
        """Returns the outcome of a kept dry run, and writes its recording to the requested path; None if there is none.

        Args:
            request: What is to be run.
        """
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
        """Keeps a dry run that has a peak.

        Args:
            request: What was run.
            outcome: Its outcome.
        """
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
