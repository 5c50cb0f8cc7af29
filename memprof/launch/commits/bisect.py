"""Finds the first commit at which a gate fails, by halving: each run leaves half of the commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from memprof.analysis.commits import Commit, Measurement
from memprof.analysis.diff.summary import Summary
from memprof.errors import InconclusiveError

#: Returns whether the gates fail; None where that cannot be judged.
Judge = Callable[[Summary, Summary], bool | None]


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
        raise InconclusiveError(f"The good commit {good.short} cannot be measured: {base.reason}")
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
            raise InconclusiveError(f"The bad commit {commits[high].short} cannot be measured: {reason}")
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
