"""A page of text and tables: colored and fitted to a terminal, plain and untruncated in a pipe."""

from __future__ import annotations

import io
import os
import shutil
import sys
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from memprof.cli.harmless import harmless

_UNCUT_WIDTH = 10_000


@dataclass
class Page:
    """Collects a verb's output and writes it to stdout at once.

    Attributes:
        is_terminal: Output is a terminal: use colors and bars, and fit lines to the width.
        width: Width in columns.
        has_colour: Use colors.
    """

    is_terminal: bool
    width: int
    has_colour: bool
    _parts: list[RenderableType] = field(default_factory=list)

    @staticmethod
    def for_stdout() -> Page:
        """Creates a page for stdout, from its type and ``NO_COLOR``, ``FORCE_COLOR`` and ``COLUMNS``."""
        is_forced = os.environ.get("FORCE_COLOR", "") not in ("", "0")
        is_terminal = is_forced or (sys.stdout is not None and sys.stdout.isatty())
        return Page(
            is_terminal=is_terminal,
            width=shutil.get_terminal_size((80, 24)).columns if is_terminal else _UNCUT_WIDTH,
            has_colour=is_terminal and not os.environ.get("NO_COLOR"),
        )

    def add(self, part: RenderableType) -> None:
        """Adds a line of text or a table."""
        self._parts.append(part)

    def add_section(self, title: str, table: Table, remark: str = "", even_if_empty: bool = False) -> None:
        """Adds a table under its title; skips a table without rows, unless `even_if_empty`."""
        if table.row_count or even_if_empty:
            self.add("")
            self.add(Text.assemble((printable(title), "bold"), (f"  {printable(remark)}" if remark else "", "dim")))
        if table.row_count:
            self.add(table)

    def render(self) -> str:
        """Returns the page as text, without trailing blanks."""
        buffer = io.StringIO()
        console = Console(
            file=buffer,
            width=self.width,
            force_terminal=self.has_colour,
            color_system="auto" if self.has_colour else None,
            markup=False,
            highlight=False,
            emoji=False,
        )
        for part in self._parts:
            console.print(part)
        text = harmless(buffer.getvalue(), keeps_colours=self.has_colour)
        return "".join(f"{line.rstrip()}\n" for line in text.splitlines())

    def write(self) -> None:
        """Writes the page to stdout."""
        print(self.render(), end="")


@dataclass(frozen=True)
class TailCell:
    """A cell truncated at the start on narrow terminals: the end of a module or file name is the most specific part.

    Attributes:
        text: The text.
    """

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Returns the minimum and preferred width of the cell."""
        width = len(printable(self.text))
        return Measurement(min(width, 6), width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws as much as fits."""
        text = printable(self.text)
        fits = len(text) <= options.max_width
        yield Text(text if fits else f"…{text[len(text) - options.max_width + 1 :]}", no_wrap=True, overflow="crop")


def printable(text: str) -> str:
    """Returns a text with every unprintable character escaped.

    Names come from the recorded job: an escape sequence in one is shown, never interpreted by the terminal.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def make_table(*headers: str) -> Table:
    """Makes a table without rules; a header that starts with ``>`` marks a right-aligned numeric column."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for header in headers:
        if header.startswith(">"):
            table.add_column(Text(header[1:]), justify="right", no_wrap=True)
        else:
            table.add_column(Text(header), overflow="ellipsis")
    return table


def cell(text: str, style: str = "") -> Text:
    """Makes a cell that is truncated, not wrapped, on narrow terminals."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")
