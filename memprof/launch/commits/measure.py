"""Dry-runs a job at commits, in a worktree, and keeps the measurements."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from memprof.analysis.commits import Commit, Job, Measurement, append_to_history, read_history
from memprof.analysis.diff.summary import summarise
from memprof.errors import BadInputError, InconclusiveError
from memprof.launch.commits.repository import GitError, Worktree
from memprof.launch.dry.isolation import why_not_apart
from memprof.launch.dry.job_server import dry_run
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import (
    NotExecutableError,
    NotFoundError,
    Target,
    find_command,
    find_module,
    find_script,
)
from memprof.trace.secrets import mask_words
from memprof.trace.store import Trace


def find_job(words: Sequence[str]) -> Target:
    """Returns the job of words such as ``train.py --epochs 1``, ``-m package.train`` or ``torchrun train.py``.

    Raises:
        NotFoundError: There is no such script or program.
        NotExecutableError: It cannot be run.
    """
    if words[0] == "-m":
        return find_module(words[1:])
    return find_script(words) if words[0].endswith(".py") else find_command(words)


class CommitRuns:
    """Measures a job at commits: by a dry run in a worktree, unless the history contains the commit already.

    Attributes:
        count: Dry runs so far.
    """

    def __init__(
        self,
        worktree: Worktree,
        words: Sequence[str],
        window: DryWindow,
        device: str = "",
        *,
        history: Path | None = None,
    ) -> None:
        """Reads the history; runs nothing yet.

        Args:
            worktree: Where commits are checked out.
            words: The job, as typed.
            window: The steps of a dry run.
            device: The device to simulate; "" for the CPU.
            history: File of earlier measurements, to which new ones are added; None for none.

        Raises:
            BadInputError: The history is damaged.
        """
        self.count = 0
        self.job = Job(" ".join(mask_words(list(words))), device, (window.skip, window.steps))
        self._worktree, self._words, self._window, self._history = worktree, tuple(words), window, history
        self._is_apart: bool | None = None
        known = [] if history is None else read_history(history)
        self._known = {one.commit.hash: one for one in known if one.job == self.job}

    def is_known(self, commit: Commit) -> bool:
        """Whether a commit was measured before, and needs no run."""
        return commit.hash in self._known

    def measure(self, commit: Commit) -> Measurement:
        """Returns the job's memory at a commit, or why that cannot be measured.

        Raises:
            EndedError: A signal that asks the whole command to end arrived during the run.
            OSError: The history cannot be written.
        """
        if commit.hash not in self._known:
            one = self._run(commit)
            self._known[commit.hash] = one
            if self._history is not None:
                append_to_history(self._history, one)
        return self._known[commit.hash]

    def _run(self, commit: Commit) -> Measurement:
        def unmeasured(reason: str) -> Measurement:
            return Measurement(commit, self.job, None, reason)

        try:
            self._worktree.check_out(commit)
        except GitError as error:
            return unmeasured(str(error))
        if not self._worktree.folder.is_dir():
            return unmeasured("the current folder does not exist at this commit.")
        self.count += 1
        with tempfile.TemporaryDirectory(prefix="memprof-commit-") as scratch, self._inside():
            kept = Path(scratch) / "commit.memprof"
            try:
                target = find_job(self._words)
            except (NotFoundError, NotExecutableError) as error:
                return unmeasured(str(error))
            outcome = dry_run(target, None, self._window, self.job.device, kept, apart=self._can_isolate())
            if outcome.peak_bytes is None:
                return unmeasured(outcome.reason)
            try:
                return Measurement(commit, self.job, summarise(Trace.open(kept)))
            except (BadInputError, InconclusiveError) as error:
                return unmeasured(str(error))

    def _inside(self) -> contextlib.AbstractContextManager[None]:
        # A job runs in the folder of the process that starts it.
        return contextlib.chdir(self._worktree.folder)

    def _can_isolate(self) -> bool:
        if self._is_apart is None:
            self._is_apart = self._window.isolate and not why_not_apart()
        return self._is_apart
