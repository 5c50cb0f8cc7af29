"""The page of `memprof history --bisect`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import attrgetter

from memprof.analysis.commits import Commit, Measurement
from memprof.analysis.diff.comparison import Diff
from memprof.analysis.diff.diff_tables import headline
from memprof.analysis.diff.explain import explain, modules_of
from memprof.analysis.diff.gates import Gate
from memprof.analysis.diff.summary import NOTHING
from memprof.analysis.table import BYTES, TEXT, FactTable, shown
from memprof.cli.page import Page
from memprof.json_values import Json, to_json
from memprof.launch.commit_runs import Bisection, Judge
from memprof.units import format_bytes, format_bytes_change, format_count, printable

#: Version of the JSON's keys.
BISECT_SCHEMA = 1
#: Modules and files that are named.
_MOST_NAMES = 8
_MOST_CAUSES = 5


def progress_line(one: Measurement, good: Measurement, judge: Judge, runs: int) -> str:
    """Returns a line on a commit that was measured."""
    start = f"run {runs}: {one.commit.short} "
    if one.summary is None:
        return f"{start}skipped: {one.reason}"
    if one is good:
        word = "the base"
    else:
        is_bad = None if good.summary is None else judge(good.summary, one.summary)
        word = {None: "cannot be judged", True: "bad", False: "good"}[is_bad]
    return f"{start}peak {format_bytes(one.summary.peak.bytes)}, {word}  {printable(one.commit.subject)}"


def _peak(one: Measurement) -> int | None:
    return None if one.summary is None else one.summary.peak.bytes


_MEASURED = (
    shown("commit", TEXT, attrgetter("commit.short")),
    shown("date", TEXT, attrgetter("commit.date")),
    shown("peak", BYTES, _peak),
    shown("subject", TEXT, attrgetter("commit.subject")),
)


def fill_bisection(
    page: Page, found: Bisection, change: Diff, files: Sequence[str], gates: Sequence[Gate], runs: int
) -> None:
    """Fills the page: the commit, what it changed and why, and every commit that was measured.

    Args:
        page: The page.
        found: The bisection.
        change: The culprit, compared with the last commit at which the gates pass.
        files: The files that the culprit changed.
        gates: The gates.
        runs: Number of dry runs.
    """
    culprit = found.culprit.commit
    words = " or ".join(gate.text for gate in gates)
    if found.between:
        count = len(found.between) + 1
        page.say(f"The first commit with {words} is one of {count}; not all could be run:", "bold")
        for commit in (*found.between, culprit):
            page.add(f"  {_named(commit)}")
    else:
        page.say(f"{culprit.short} is the first commit with {words}.", "bold")
        page.add(f"  {culprit.date}  {printable(culprit.author)}  {printable(culprit.subject)}")
    for merge in found.merges:
        page.add(f"  merged by {_named(merge.commit)}")
    page.add(printable(headline(change)))
    causes = explain(change)
    for place, cause in enumerate(causes[:_MOST_CAUSES], 1):
        page.add(f"  {place}. {printable(cause.sentence)}")
    modules = modules_of(change)
    if modules:
        shown = [
            f"{'(outside any module)' if one.name == NOTHING else printable(one.name)} {format_bytes_change(one.bytes)}"
            for one in modules[:_MOST_NAMES]
        ]
        page.add(f"Modules: {_listed(shown, len(modules))}")
    if files:
        page.add(f"Files: {_listed([printable(name) for name in files[:_MOST_NAMES]], len(files))}")
    page.add_section(format_count(runs, "dry run"), FactTable(_MEASURED, found.measured))
    page.add("")
    page.say(f"To see the change: git show {culprit.short}", "dim")


def bisection_to_json(found: Bisection, change: Diff, files: Sequence[str], runs: int) -> Json:
    """Returns a bisection ready for ``json.dump``.

    Args:
        found: The bisection.
        change: The culprit, compared with the last commit at which the gates pass.
        files: The files that the culprit changed.
        runs: Number of dry runs.
    """
    return {
        "schema": BISECT_SCHEMA,
        "culprit": None if found.between else _commit(found.culprit),
        "candidates": [dataclasses.asdict(commit) for commit in (*found.between, found.culprit.commit)],
        "before": _commit(found.before),
        "merges": [_commit(one) for one in found.merges],
        "files": list(files),
        "headline": headline(change),
        "causes": [to_json(cause) for cause in explain(change)],
        "modules": [{"name": one.name, "delta_bytes": one.bytes} for one in modules_of(change)],
        "runs": runs,
        "measured": [_commit(one) for one in found.measured],
    }


def _listed(names: Sequence[str], count: int) -> str:
    more = count - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _commit(one: Measurement) -> Json:
    return {**dataclasses.asdict(one.commit), "peak_allocated_bytes": _peak(one), "reason": one.reason}


def _named(commit: Commit) -> str:
    return f"{commit.short}  {commit.date}  {printable(commit.subject)}"
