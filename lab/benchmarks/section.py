"""One table of measured figures, for the terminal and for the page it is in, and what it was measured on."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
from rich.table import Table

from memprof.units import format_bytes


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
