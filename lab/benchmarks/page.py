"""Writes sections between the markers of their pages, a table of their bars at the top, and long tables as files."""

from __future__ import annotations

import csv
import datetime
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lab.benchmarks.section import Section, describe_machine

ROOT = Path(__file__).resolve().parents[2]
DOCS, RESULTS = ROOT / "docs", Path(__file__).parent / "results"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
#: Around the table of key figures, on pages that have one.
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary: begin -->", "<!-- summary: end -->"
_ROW = re.compile(r"^\| \[.*?\]\(#?(.*?)\) \|.*$", re.MULTILINE)


def write_pages(sections: Sequence[Section]) -> None:
    """Replaces the tables of these sections on their pages."""
    for name in dict.fromkeys(section.page for section in sections):
        write_page(DOCS / name, [section for section in sections if section.page == name])


def write_page(page: Path, sections: Sequence[Section]) -> None:
    """Replaces the tables of these sections between the markers of a page, in the order of the others or behind."""
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    body, _, tail = rest.partition(END)
    day, machine = datetime.datetime.now(datetime.UTC).date().isoformat(), describe_machine()
    measured = f"Measured {day}." if machine in head else f"Measured {day}: {machine}"
    kept = {part.partition("\n")[0]: f"### {part.strip()}\n" for part in body.split("### ")[1:]}
    kept |= {section.title: part_of(section, measured, has_summary=SUMMARY_BEGIN in head) for section in sections}
    if SUMMARY_BEGIN in head:
        head = with_summary(head, sections, kept)
    page.write_text(f"{head}{BEGIN}\n" + "\n".join(kept.values()) + f"{END}{tail}", encoding="utf-8")


def part_of(section: Section, measured: str, *, has_summary: bool) -> str:
    """Returns a section's part of its page, and writes its rows to a file where the page has a summary of them.

    Args:
        section: The section.
        measured: When, and on what where the top of the page does not say so.
        has_summary: Whether bars are in a table at the top of the page.
    """
    text = section.markdown()
    if section.bar and not has_summary:
        text += f"\n**{section.bar.sentence()}**\n"
    if section.brief:
        path = RESULTS / f"{_anchor(section.title)}.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([section.columns, *section.rows])
        measured += f" Every row: `{path.relative_to(ROOT)}`."
    return f"{text}\n{measured}\n"


def with_summary(head: str, sections: Sequence[Section], titles: Iterable[str]) -> str:
    """Writes the bars of sections into the table at the top of a page.

    Args:
        head: The page up to what is measured.
        sections: Those measured now; the rows of others stay.
        titles: All titles of the page, in their order.
    """
    before, _, rest = head.partition(SUMMARY_BEGIN)
    old, _, after = rest.partition(SUMMARY_END)
    rows = {row[1]: row[0] for row in _ROW.finditer(old)}
    for section in sections:
        if bar := section.bar:
            met = "yes" if bar.passed else "**no**"
            anchor = _anchor(section.title)
            rows[anchor] = f"| [{section.title}](#{anchor}) | {bar.measured} | {bar.required} | {met} |"
    anchors = [_anchor(title) for title in titles]
    first = [anchor for anchor in rows if anchor not in anchors]  # of other pages
    lines = [rows[anchor] for anchor in (*first, *(anchor for anchor in anchors if anchor in rows))]
    table = "\n".join(["| what | measured | bar | met |", "|---|---|---|---|", *lines])
    return f"{before}{SUMMARY_BEGIN}\n{table}\n{SUMMARY_END}{after}"


def _anchor(title: str) -> str:
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())
