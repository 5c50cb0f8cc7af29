"""The page of `memprof diff`."""

from __future__ import annotations

import shlex

from memprof.analysis.diff.comparison import Diff
from memprof.analysis.diff.diff_tables import changed, moments
from memprof.analysis.diff.diff_words import headline, moved, rank_words, titles_of
from memprof.analysis.diff.explain import explain, modules_of
from memprof.cli.page import Page
from memprof.units import format_bytes_change


def fill_diff(page: Page, found: Diff, rows: int, *, explains: bool, names: tuple[str, str]) -> None:
    """Adds a diff to a page.

    Args:
        page: The page.
        found: The diff.
        rows: Maximum rows per table.
        explains: Explain the changes in words.
        names: Names of the two sides.
    """
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
