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
class Section:
    """One benchmark's result.

    Attributes:
        title: Heading.
        how: What was measured and how, in a few sentences.
        columns: Column headings; all but the first are set to the right.
        rows: Cells as text.
        bar: The bar to pass and whether it was passed; empty where there is none.
        page: File of docs/ that the table is in.
    """

    title: str
    how: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    bar: str = ""
    page: str = "benchmarks.md"

    def table(self) -> Table:
        """Renders the section for the terminal."""
        table = Table(title=self.title, caption=self.bar or None, title_justify="left", caption_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Renders the section for the page."""
        lines = [f"### {self.title}", "", self.how, ""]
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("|---" + "|--:" * (len(self.columns) - 1) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        if self.bar:
            lines += ["", f"**{self.bar}**"]
        return "\n".join(lines) + "\n"


def verdict(text: str, *, passed: bool) -> str:
    """Returns the sentence for a bar and whether it was passed."""
    return f"Bar: {text}: {'passed' if passed else 'NOT passed'}."


def middle_and_quartiles(values: Sequence[float]) -> tuple[str, str]:
    """Returns the cells with the median of ratios and their quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f}", f"{low:.3f} to {high:.3f}"


def signed_percent(ratio: float, digits: int = 2) -> str:
    """Returns an error, given as a share, in per cent with its sign; 0 without one."""
    return f"{100 * ratio:+.{digits}f} %" if round(100 * ratio, digits) else f"{0:.{digits}f} %"


def describe_machine() -> str:
    """Returns one paragraph: processor, cores, memory, system and versions."""
    return (
        f"{_processor()}, {_cores()} cores, {format_bytes(psutil.virtual_memory().total)} of memory, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {version('torch')}."
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
