"""Tables of measured figures, for the terminal and for the pages they are in, and what they were measured on.

Pages have their sections between markers, a table of their bars at the top, and long tables as files.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
from rich.table import Table

from memprof.units import format_bytes

ROOT = Path(__file__).resolve().parents[2]
DOCS, RESULTS = ROOT / "docs", Path(__file__).parent / "results"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
#: Around the table of key figures, on pages that have one.
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary: begin -->", "<!-- summary: end -->"
_ROW = re.compile(r"^\| \[.*?\]\(#?(.*?)\) \|.*$", re.MULTILINE)


@dataclass(frozen=True)
class Bar:
    """What a section is held to.

    Attributes:
        required: The requirement.
        measured: The figures held to it.
        passed: Whether it is met.
    """

    required: str
    measured: str
    passed: bool

    def sentence(self) -> str:
        """Returns it for the terminal, and for pages without a table of key figures."""
        return f"Bar: {self.required}. Measured: {self.measured}. {'Met' if self.passed else 'NOT met'}."


@dataclass(frozen=True)
class Section:
    """One benchmark's result.

    Attributes:
        title: Heading.
        how: What was measured and how, in a few sentences.
        columns: Column headings; all but the first are set to the right.
        rows: Cells as text.
        bar: The target and whether it was met; None without a target.
        page: File of docs/ that the table is in.
        brief: Columns and rows that stand for many rows on the page; all rows are then in a file of `results`.
    """

    title: str
    how: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    bar: Bar | None = None
    page: str = "benchmarks.md"
    brief: tuple[tuple[str, ...], Sequence[tuple[str, ...]]] | None = None

    def table(self) -> Table:
        """Renders the section for the terminal."""
        caption = self.bar.sentence() if self.bar else None
        table = Table(title=self.title, caption=caption, title_justify="left", caption_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Renders the section for the page, without its bar."""
        columns, rows = self.brief or (self.columns, self.rows)
        lines = [f"### {self.title}", "", self.how, ""]
        lines.append("| " + " | ".join(columns) + " |")
        lines.append("|---" + "|--:" * (len(columns) - 1) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join(lines) + "\n"


def bytes_in(cell: str) -> int:
    """Returns the bytes that a cell states, such as ``1,048,576``."""
    return int(cell.replace(",", ""))


def least_middle_most(rows: Sequence[tuple[str, ...]], column: int) -> list[tuple[str, ...]]:
    """Returns three of many rows: those with the least, the median and the largest number in a column."""
    ordered = sorted(rows, key=lambda row: float(row[column].replace(",", "").rstrip(" %")))
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def middle_and_quartiles(values: Sequence[float]) -> tuple[str, str]:
    """Returns the cells with the median of ratios and their quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f}", f"{low:.3f} to {high:.3f}"


def signed_percent(ratio: float, digits: int = 2) -> str:
    """Returns an error, given as a share, in per cent with its sign; 0 without one."""
    return f"{100 * ratio:+.{digits}f} %" if round(100 * ratio, digits) else f"{0:.{digits}f} %"


def describe_machine() -> str:
    """Returns processor, cores, memory and versions, in a line."""
    return (
        f"{_processor()}, {_cores()} cores, {format_bytes(psutil.virtual_memory().total)}, "
        f"Python {platform.python_version()}, torch {version('torch')}."
    )


def describe_load() -> str:
    """Returns one sentence on how busy the machine is: the load average of the last minute and the number of cores."""
    return f"Load average when timing began: {os.getloadavg()[0]:.1f} on {_cores()} cores."


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
