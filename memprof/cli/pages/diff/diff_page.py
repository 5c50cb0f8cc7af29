"""A diff for people: the page of `memprof diff`, a Markdown comment, GitHub annotations, and HTML."""

from __future__ import annotations

import html
import os
import re
import shlex
from pathlib import Path

from memprof.analysis.diff.comparison import Diff
from memprof.analysis.diff.diff_tables import (
    changed,
    first_line,
    headline,
    moments,
    moved,
    rank_words,
    short,
    titles_of,
)
from memprof.analysis.diff.explain import explain, modules_of
from memprof.analysis.diff.gates import Verdict
from memprof.analysis.table import FactTable
from memprof.cli.page import Page, html_page, html_table
from memprof.units import format_bytes_change, workflow_text


def fill_diff(page: Page, found: Diff, rows: int, *, explains: bool, names: tuple[str, str]) -> None:
    """Adds a diff to a page."""
    page.say(headline(found), "bold")
    for level, verdict in found.verdicts:
        if verdict.is_failed:
            word, style = ("FAILED", "bold red") if level == "fail" else ("warning", "yellow")
            page.say(f"{word}: gate {verdict.gate.text}: {verdict.describe()}", style)
        elif not verdict.is_known:
            page.warn(f"gate {verdict.gate.text}: {verdict.describe()}")
    for difference in found.differences:
        sentence = f"{difference.what} is {difference.base} in the base and {difference.head} now"
        page.warn(sentence)
    page.warn(*found.warnings)
    page.say(moved(found))
    if ranks := rank_words(found):
        page.say(ranks)
    if explains:
        _explain(page, found)
    page.add_section("Peaks", moments(found), "allocated bytes, of the whole step and of each phase")
    for kind, title in titles_of(found).items():
        parts, more = changed(found.focus, kind, rows)
        remark = f"in {found.focus.name}; the parts sum to the change" + (f"; {more} more" if more else "")
        page.add_section(f"What changed, {title}", parts, remark)
    passed = [verdict.gate.text for level, verdict in found.verdicts if verdict.is_known and not verdict.is_failed]
    if passed:
        page.add("")
        page.say(f"passed: {', '.join(passed)}", "green")
    base, head = map(shlex.quote, names)
    if not any(name.endswith(".json") for name in names):
        page.add_next((f"memprof dashboard {base} {head}", "compare both in a browser"))
    elif not names[1].endswith(".json"):
        page.add_next((f"memprof report {head}", "what fills it now"))


def _explain(page: Page, found: Diff) -> None:
    causes = explain(found)
    page.add("")
    if not causes:
        page.say("No cause: nothing changed." if found.is_unchanged else "No cause found beyond the tables.")
    for number, cause in enumerate(causes, start=1):
        page.say(f"{number}. {cause.sentence}")
    modules = modules_of(found, folds=True)
    if modules:
        parts = ", ".join(f"{one.name} {format_bytes_change(one.bytes)}" for one in modules[:8])
        more = f" and {len(modules) - 8} more" if len(modules) > 8 else ""
        page.say(f"90 % of the change in {found.focus.name} is in: {parts}{more}")


#: Marks the comment so that a later run can replace it. It comes last because mail previews show the beginning.
MARKER = "<!-- memprof-diff -->"
#: GitHub's limit on comments: 65,536 characters.
_LONGEST = 60_000
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~@$^:/=-])")


def to_markdown(found: Diff, rows: int, names: tuple[str, str]) -> str:
    """Returns a diff as Markdown for a review comment, with a hidden marker at the end.

    Args:
        found: The diff.
        rows: Maximum rows per table; fewer if the comment would be too long.
        names: Names of the two sides.
    """
    while True:
        text = _markdown(found, rows, names)
        if len(text) <= _LONGEST or rows <= 1:
            return text
        rows = max(1, rows // 2)


def to_github(found: Diff, rows: int, names: tuple[str, str]) -> str:
    """Returns GitHub annotations on the line that changed most, and appends the tables to the job summary.

    The summary is the file in ``GITHUB_STEP_SUMMARY``; if it is unset, only the annotations are written.
    """
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(to_markdown(found, rows, names))
    lines = []
    for level, verdict in found.verdicts:
        if verdict.is_failed or not verdict.is_known:
            kind = "error" if level == "fail" and verdict.is_failed else "warning"
            place = _place(found) if verdict.is_failed else ""
            title = _property(f"memprof gate {verdict.gate.text}")
            words = f"{verdict.describe()}. {headline(found)}" if verdict.is_failed else verdict.describe()
            lines.append(f"::{kind} {place}title={title}::{workflow_text(words)}")
    if not lines:
        lines.append(f"::notice title=memprof::{workflow_text(headline(found))}")
    return "\n".join(lines) + "\n"


def to_html(found: Diff, rows: int, names: tuple[str, str]) -> str:
    """Returns a diff as a self-contained HTML page."""
    parts = [
        f"<h1>{html.escape(headline(found))}</h1>",
        *(f"<p class='{kind}'>{html.escape(words)}</p>" for kind, words in _remarks(found)),
        f"<p>{html.escape(f'{names[0]} against {names[1]}. {moved(found)}')}</p>",
        html_table(moments(found, has_places=False), short),
    ]
    for kind, title in titles_of(found).items():
        changes, more = changed(found.focus, kind, rows)
        if changes:
            parts.append(f"<h2>What changed, {title}, in {html.escape(found.focus.name)}</h2>")
            parts.append(html_table(changes, short))
            parts.append(f"<p>{more} more.</p>" if more else "")
    body = "\n".join(part for part in parts if part)
    return html_page("memprof diff", body)


def _markdown(found: Diff, rows: int, names: tuple[str, str]) -> str:
    icons = {"fail": ":x:", "warn": ":warning:", "pass": ":white_check_mark:"}
    parts = [f"### Memory: {_safe(headline(found))}", ""]
    parts += [f"{icons[kind]} {_safe(words)}  " for kind, words in _remarks(found)]
    parts += ["", f"{_safe(moved(found))} {_safe(rank_words(found))}".strip(), ""]
    causes = explain(found)
    if causes:
        parts += [
            "Most likely cause first:",
            "",
            *(f"{place}. {_safe(one.sentence)}" for place, one in enumerate(causes[:5], 1)),
        ]
        parts.append("")
    parts += table_lines(moments(found, has_places=False))
    for kind, title in titles_of(found).items():
        changes, more = changed(found.focus, kind, rows)
        if changes:
            summary = f"What changed, {title}, in {found.focus.name}"
            parts += ["", f"<details><summary>{html.escape(summary)}</summary>", ""]
            parts += table_lines(changes)
            parts += ["", f"{more} more." if more else "", "</details>"]
    parts += ["", f"<sub>{html.escape(names[0])} against {html.escape(names[1])}, by memprof</sub>", MARKER]
    return "\n".join(parts) + "\n"


def _remarks(found: Diff) -> list[tuple[str, str]]:
    """Returns the gate results, failures first, then further notes."""
    remarks = [_remark(level, verdict) for level, verdict in found.verdicts]
    remarks += [("warn", f"{one.what} is {one.base} in the base and {one.head} now") for one in found.differences]
    remarks += [("warn", warning) for warning in found.warnings]
    return sorted(remarks, key=lambda one: ("fail", "warn", "pass").index(one[0]))


def _remark(level: str, verdict: Verdict) -> tuple[str, str]:
    kind = "pass" if verdict.is_known and not verdict.is_failed else "warn"
    return (level if verdict.is_failed else kind), f"{verdict.gate.text}: {verdict.describe()}"


def table_lines(facts: FactTable) -> list[str]:
    """Returns the lines of a table in Markdown."""
    heads = [column.heading or "" for column in facts.columns]
    lines = [
        f"| {' | '.join(heads)} |",
        f"|{''.join('--:|' if column.unit.is_number else '---|' for column in facts.columns)}",
    ]
    return lines + [f"| {' | '.join(_safe(short(cell.text)) for cell in row.cells)} |" for row in facts.rows]


def _place(found: Diff) -> str:
    """Returns the annotation's file and line, if the line that changed most is below the current folder."""
    first = first_line(found)
    file, line = found.head.lines.get(first.name, ("", 0)) if first is not None else ("", 0)
    folder = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    if not file or not Path(file).is_relative_to(folder):
        return ""
    return f"file={_property(str(Path(file).relative_to(folder)))},line={line},"


def _safe(text: str) -> str:
    """Returns a text escaped for Markdown, on one line."""
    return _SPECIAL.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _property(text: str) -> str:
    return workflow_text(text).replace(":", "%3A").replace(",", "%2C")
