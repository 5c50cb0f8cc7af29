"""Dry-runs a job at commits in a worktree, and finds the first at which a gate fails by halving."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memprof.analysis.commits import Commit, Job, Measurement, append_to_history, read_history
from memprof.analysis.diff.summary import Summary, summarise
from memprof.errors import BadInputError, InconclusiveError
from memprof.launch.dry.job_server import dry_run
from memprof.launch.dry.rank_processes import why_not_apart
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import (
    NotExecutableError,
    NotFoundError,
    Target,
    find_command,
    find_module,
    find_script,
)
from memprof.launch.repository import GitError, Worktree
from memprof.trace.secrets import mask_words
from memprof.trace.store import Trace

#: Returns whether the gates fail; None where that cannot be judged.
Judge = Callable[[Summary, Summary], bool | None]


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
        with tempfile.TemporaryDirectory(prefix="memprof-commit-") as scratch, contextlib.chdir(self._worktree.folder):
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

    def _can_isolate(self) -> bool:
        if self._is_apart is None:
            self._is_apart = self._window.isolate and not why_not_apart()
        return self._is_apart


@dataclass(frozen=True)
class Bisection:
    """The result of a bisection.

    Attributes:
        good: The commit that all others are compared with.
        before: The last commit at which the gates pass.
        culprit: The first at which they fail.
        between: Commits between these two that could not be measured, any of which may be the first.
        measured: All measurements, in the order in which they were made.
        merges: The merges that brought the culprit in, the outermost first; none if it is on the line of first parents.
    """

    good: Measurement
    before: Measurement
    culprit: Measurement
    between: tuple[Commit, ...]
    measured: tuple[Measurement, ...]
    merges: tuple[Measurement, ...] = ()


def bisect_commits(
    good: Commit, later: Sequence[Commit], measure: Callable[[Commit], Measurement], judge: Judge
) -> Bisection:
    """Finds the first commit at which the gates fail, compared with a good one.

    The last commit is assumed to fail, and measured only if no other commit fails: of 200 commits, at most 9 are run,
    including the good one.

    Args:
        good: The commit that all are compared with.
        later: The commits after it, oldest first; the last is the bad one.
        measure: Measures a commit.
        judge: Compares the good commit with another.

    Raises:
        InconclusiveError: The good commit cannot be measured, or the gates pass at the bad one.
    """
    commits, base = [good, *later], measure(good)
    if base.summary is None:
        raise InconclusiveError(f"the good commit {good.short} cannot be measured: {base.reason}")
    reference, measured = base.summary, {0: base}

    def judge_at(place: int) -> bool | None:
        one = measured[place] = measure(commits[place])
        return None if one.summary is None else judge(reference, one.summary)

    low, high, skipped = 0, len(commits) - 1, set[int]()
    while (tried := _middle(low, high, skipped)) is not None:
        verdict = judge_at(tried)
        if verdict is None:
            skipped.add(tried)
        elif verdict:
            high = tried
        else:
            low = tried
    if high not in measured:
        verdict = judge_at(high)
        if verdict is None:
            reason = measured[high].reason or "its gates cannot be judged."
            raise InconclusiveError(f"the bad commit {commits[high].short} cannot be measured: {reason}")
        if not verdict:
            raise InconclusiveError(_describe_pass(measured[high], base))
    between = tuple(commits[low + 1 : high])
    return Bisection(base, measured[low], measured[high], between, tuple(measured.values()))


def search_branches(
    found: Bisection,
    branches_of: Callable[[Commit], Iterable[Sequence[Commit]]],
    measure: Callable[[Commit], Measurement],
    judge: Judge,
) -> Bisection:
    """Follows a culprit that is a merge into the branches that it merged, and into the merges of those.

    Commits of the branch are compared with the one where it began: what happened since on the other line is not in it.

    Args:
        found: A bisection along first parents.
        branches_of: Returns, for each branch of a merge, the commit where it began and its commits, oldest first; none
            for a commit that is not a merge.
        measure: As for `bisect_commits`.
        judge: As for `bisect_commits`.
    """
    while not found.between:
        for branch in branches_of(found.culprit.commit):
            try:
                inner = bisect_commits(branch[0], branch[1:], measure, judge)
            except InconclusiveError:
                continue  # no commit of this branch fails alone, or it cannot be run
            before = {one.commit.hash for one in found.measured}  # the branch may begin at one of these
            measured = (*found.measured, *(one for one in inner.measured if one.commit.hash not in before))
            found = replace(inner, good=found.good, measured=measured, merges=(*found.merges, found.culprit))
            break
        else:
            return found  # not a merge, or the merge itself is the answer
    return found


def _middle(low: int, high: int, skipped: set[int]) -> int | None:
    """Returns the commit to run next, the one nearest to the middle that was not skipped; None if none is left."""
    # The later half is the smaller one: if no run fails, the bad commit costs one more.
    middle = low + (high - low + 1) // 2
    left = [place for place in range(low + 1, high) if place not in skipped]
    return min(left, key=lambda place: abs(place - middle), default=None)


def _describe_pass(bad: Measurement, good: Measurement) -> str:
    assert bad.summary is not None
    assert good.summary is not None
    return (
        f"No gate fails at {bad.commit.short}: the peak is {bad.summary.peak.bytes:,} B there, and "
        f"{good.summary.peak.bytes:,} B at {good.commit.short}. Choose another gate with --fail-on, such as 'peak>+0'."
    )
