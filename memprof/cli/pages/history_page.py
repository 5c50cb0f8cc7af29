"""The page of `memprof history`, also as HTML: a chart over commits, and the changes; and that of its --bisect."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence
from operator import attrgetter

from memprof.analysis.commits import HISTORY_SCHEMA, Commit, Job, Measurement, Step
from memprof.analysis.diff.comparison import Diff
from memprof.analysis.diff.diff_tables import headline, percent
from memprof.analysis.diff.explain import explain, modules_of
from memprof.analysis.diff.gates import Gate, measure
from memprof.analysis.diff.summary import NOTHING
from memprof.analysis.table import (
    BYTES,
    FIGURE,
    TEXT,
    WORDS,
    Column,
    FactTable,
    Unit,
    records,
    rows_of,
    shown,
)
from memprof.cli.page import Page, html_page, html_table
from memprof.cli.pages.drawings import draw_columns
from memprof.json_values import Json, number, to_json
from memprof.launch.commit_runs import Bisection, Judge
from memprof.units import format_bytes, format_bytes_change, format_count, format_us, format_us_change, printable

#: Smallest change from one commit to the next that is marked, as a share.
LEAST_SHARE = 0.01
_LEAST_WIDTH = 24
_MOST_CAUSES = 3
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 1000, 320, 90, 24, 12


def in_order(history: Sequence[Measurement], job: Job | None, on_branch: Sequence[str]) -> list[Measurement]:
    """Returns the measurements of a job, sorted by the order of its commits.

    Args:
        history: The measurements, as read.
        job: The job; None for the one that was measured last.
        on_branch: Hashes of the branch's commits, oldest first. Others are left out, unless none is on it.
    """
    chosen = [one for one in history if one.job == (job or history[-1].job)]
    place = {name: at for at, name in enumerate(on_branch)}
    found = [one for one in chosen if one.commit.hash in place]
    return sorted(found, key=lambda one: place[one.commit.hash]) if found else chosen


def value_of(one: Measurement, gate: Gate) -> float:
    """Returns what is drawn of a commit, in bytes or microseconds; NaN where unknown."""
    return math.nan if one.summary is None else measure(gate, one.summary)


def format_value(value: float, gate: Gate) -> str:
    """Formats what is drawn, with its unit; "" for NaN."""
    if math.isnan(value):
        return ""
    return format_us(value) if gate.unit == "us" else format_bytes(int(value))


def format_change(step: Step, gate: Gate) -> str:
    """Formats a change, with its unit and its share of the value before, which is signed."""
    size = format_us_change(step.change) if gate.unit == "us" else format_bytes_change(int(step.change))
    share = percent(step.change, step.base)
    return f"{size} ({share})" if share else size


def progress_line(one: Measurement, place: int, count: int) -> str:
    """Returns a line on a commit that was run."""
    if one.summary is None:
        return f"{place}/{count}: {one.commit.short} skipped: {one.reason}"
    peak = format_bytes(one.summary.peak.bytes)
    return f"{place}/{count}: {one.commit.short} peak {peak}  {printable(one.commit.subject)}"


_MEASURE = Unit("number", is_number=True)
_CAUSES = (Column("kind", None), Column("sentence", None), Column("bytes", None, BYTES))


def step_columns(gate: Gate | None = None, name: str = "value") -> tuple[Column, ...]:
    """Returns the columns of changes from one commit to the next.

    Args:
        gate: What is drawn; None for JSON alone.
        name: Its name.
    """

    def causes(step: Step) -> list[str]:
        return [cause.sentence for cause in step.causes[:_MOST_CAUSES]]

    return (
        Column("commit", None, TEXT, attrgetter("after.commit.hash")),
        Column("before", None, TEXT, attrgetter("before.commit.hash")),
        shown("commit", TEXT, attrgetter("after.commit.short"), key="short"),
        shown("date", TEXT, attrgetter("after.commit.date")),
        Column("base", None, _MEASURE),
        Column("head", None, _MEASURE),
        shown(name, FIGURE, lambda step: gate and format_value(step.head, gate), key="figure"),
        shown("change", FIGURE, lambda step: gate and format_change(step, gate)),
        shown("subject", TEXT, attrgetter("after.commit.subject")),
        shown("likeliest cause", WORDS, lambda step: "".join(causes(step)[:1])),
        shown("further causes", WORDS, lambda step: "; ".join(causes(step)[1:]), is_wide=True),
        Column("causes", None, rows_of(_CAUSES)),
    )


STEPS = step_columns()


def fill_history(page: Page, history: Sequence[Measurement], steps: Sequence[Step], gate: Gate, name: str) -> None:
    """Fills the page."""
    known = [one for one in history if not math.isnan(value_of(one, gate))]
    job = history[-1].job
    where = f" on {printable(job.device)}" if job.device else ""
    skipped = len(history) - len(known)
    page.say(
        f"{name} of {job.command}{where}, {len(known)} "
        f"{'commit' if len(known) == 1 else 'commits'}"
        f"{f' ({skipped} could not be measured)' if skipped else ''}",
        "bold",
    )
    marked = {step.after.commit.hash for step in steps}
    values = [value_of(one, gate) for one in known]
    marks = [place for place, one in enumerate(known) if one.commit.hash in marked]
    for line in draw_columns(values, marks, lambda value: format_value(value, gate), max(page.width, _LEAST_WIDTH)):
        page.add(line)
    page.add_section(f"Changes of {100 * LEAST_SHARE:.0f} % and more", FactTable(step_columns(gate, name), steps))
    if not steps:
        page.add(f"No commit changed it by {100 * LEAST_SHARE:.0f} % or more.")
    else:
        page.add("")
        page.say(f"To see the last change: git show {steps[-1].after.commit.short}", "dim")


def history_to_json(history: Sequence[Measurement], steps: Sequence[Step], gate: Gate, name: str) -> Json:
    """Returns what is drawn, ready for ``json.dump``."""
    return {
        "schema": HISTORY_SCHEMA,
        "job": history[-1].job.command,
        "device": history[-1].job.device,
        "measure": name,
        "unit": gate.unit,
        "commits": [
            {**dataclasses.asdict(one.commit), "value": number(value_of(one, gate)), "reason": one.reason}
            for one in history
        ],
        "changes": records(STEPS, steps),
    }


def history_to_html(history: Sequence[Measurement], steps: Sequence[Step], gate: Gate, name: str) -> str:
    """Returns the page: a line over the commits, the changes marked, and a table of them."""
    known = [one for one in history if not math.isnan(value_of(one, gate))]
    job = history[-1].job
    title = f"{name} of {job.command}{f' on {job.device}' if job.device else ''}, {len(known)} commits"
    chart = _chart(known, {step.after.commit.hash for step in steps}, gate)
    table = html_table(FactTable(step_columns(gate, name), steps))
    return html_page("memprof history", f"<h1>{html.escape(title)}</h1>\n{chart}\n{table}")


def _chart(known: Sequence[Measurement], changed: set[str], gate: Gate) -> str:
    values = [value_of(one, gate) for one in known]
    most = max(values, default=0.0) or 1.0
    wide, high = _WIDTH - _LEFT - 10, _HEIGHT - _BOTTOM - _TOP
    across = [_LEFT + wide * place / max(len(known) - 1, 1) for place in range(len(known))]
    down = [_TOP + high * (1 - value / most) for value in values]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="The value at each commit">']
    for share in (1.0, 0.5, 0.0):
        y = _TOP + high * (1 - share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = html.escape(format_value(most * share, gate))
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<polyline points="{line}"/>')
    for one, x, y, value in zip(known, across, down, values, strict=True):
        kind = ' class="changed"' if one.commit.hash in changed else ""
        words = f"{one.commit.short} {one.commit.date} {one.commit.subject}: {format_value(value, gate)}"
        parts.append(f'<circle{kind} cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{html.escape(words)}</title></circle>')
    for place, anchor in ((0, "start"), (len(known) - 1, "end")):
        if known:
            commit = known[place].commit
            text = html.escape(f"{commit.short} {commit.date}")
            parts.append(f'<text x="{across[place]:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{text}</text>')
    return "\n".join([*parts, "</svg>"])


#: Version of the JSON's keys.
BISECT_SCHEMA = 1
#: Modules and files that are named.
_MOST_NAMES = 8
_CAUSES_OF_CULPRIT = 5


def bisection_line(one: Measurement, good: Measurement, judge: Judge, runs: int) -> str:
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
    """Fills the page: the commit, what it changed and why, and every commit that was measured."""
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
    for place, cause in enumerate(causes[:_CAUSES_OF_CULPRIT], 1):
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
