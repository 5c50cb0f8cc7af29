"""A page of text and tables: colored and fitted to a terminal; in a pipe plain, wrapped where wide, and never cut."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from memprof.analysis.table import Cell, Column, FactTable
from memprof.harmless import harmless
from memprof.units import elided, printable

_UNCUT_WIDTH = 10_000
#: Width of tables in a pipe, unless ``COLUMNS`` is set.
_PIPED_WIDTH = 160
#: Blanks between columns.
_GAP = 2
#: A column of words is not made narrower than this in a pipe.
_LEAST_WIDTH = 24
#: Nor than the longest name in it, up to this length.
_LONGEST_NAME = 48
_BAR_WIDTH = 16
_COLOURS = {
    "parameter": "blue",
    "buffer": "bright_blue",
    "gradient": "magenta",
    "optimizer_state": "cyan",
    "input": "white",
    "activation": "green",
    "temporary": "yellow",
    "workspace": "bright_yellow",
    "collective": "bright_magenta",
    "unknown": "red",
}
_TONES = {"good": "green", "bad": "red"}


@dataclass
class Page:
    """Collects a verb's output and writes it to stdout at once.

    Attributes:
        is_terminal: Output is a terminal: use colors and bars, and fit lines to the width.
        width: Width in columns; in a pipe that of tables alone, since a sentence stays on one line.
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
        given = os.environ.get("COLUMNS", "")
        piped = int(given) if given.isdecimal() and int(given) else _PIPED_WIDTH
        return Page(
            is_terminal=is_terminal,
            width=shutil.get_terminal_size((80, 24)).columns if is_terminal else piped,
            has_colour=is_terminal and not os.environ.get("NO_COLOR"),
        )

    def add(self, part: RenderableType | FactTable) -> None:
        """Adds a line of text or a table."""
        self._parts.append(draw(part, self.width, has_bars=self.is_terminal) if isinstance(part, FactTable) else part)

    def say(self, sentence: str, style: str = "") -> None:
        """Adds a sentence; it may hold names from a recording."""
        self.add(Text(printable(sentence), style=style))

    def warn(self, *sentences: str) -> None:
        """Adds warnings."""
        for sentence in sentences:
            self.say(f"warning: {sentence}", "yellow")

    def add_next(self, *commands: tuple[str, str]) -> None:
        """Adds the commands to run next, each with its reason, below an empty line."""
        self.add("")
        for command, reason in commands:
            self.add(Text.assemble(("next: ", "dim"), printable(command), (f"  {printable(reason)}", "dim")))

    def add_section(self, title: str, facts: FactTable, remark: str = "", even_if_empty: bool = False) -> None:
        """Adds a table under its title; skips a table without rows, unless `even_if_empty`."""
        if facts or even_if_empty:
            self.add("")
            self.add(Text.assemble((printable(title), "bold"), (f"  {printable(remark)}" if remark else "", "dim")))
        if facts:
            self.add(facts)

    def render(self) -> str:
        """Returns the page as text, without trailing blanks."""
        buffer = io.StringIO()
        console = Console(
            file=buffer,
            width=self.width if self.is_terminal else _UNCUT_WIDTH,
            force_terminal=self.has_colour,
            color_system="auto" if self.has_colour else None,
            markup=False,
            highlight=False,
            emoji=False,
        )
        for part in self._parts:
            if isinstance(part, Table) and not self.is_terminal:
                console.print(part, width=_wrap(part, console, self.width))
            else:
                console.print(part)
        text = harmless(buffer.getvalue(), keeps_colours=self.has_colour)
        return "".join(f"{line.rstrip()}\n" for line in text.splitlines())

    def write(self) -> None:
        """Writes the page to stdout."""
        print(self.render(), end="")


def show(fill: Callable[[Page], None], to_json: Callable[[], Any], *, is_json: bool) -> None:
    """Prints a page, or its content as JSON."""
    if is_json:
        print(json.dumps(to_json(), indent=2, allow_nan=False))
        return
    page = Page.for_stdout()
    fill(page)
    page.write()


def _wrap(table: Table, console: Console, width: int) -> int:
    """Lets a table's columns of words wrap, so that nothing is cut; numbers, places and modules stay on one line.

    Returns:
        The width to draw it in: the given one, or the least that the table can have.
    """
    least = 0
    for column in table.columns:
        cells = list(column.cells)
        natural = max(Measurement.get(console, console.options, one).maximum for one in (column.header, *cells))
        words = (word for one in cells if isinstance(one, Text) for word in one.plain.split())
        names = (length for length in map(cell_len, words) if length <= _LONGEST_NAME)
        column.no_wrap = column.no_wrap or any(isinstance(one, FittedCell) for one in cells)
        column.min_width = natural if column.no_wrap else min(natural, max((_LEAST_WIDTH, *names)))
        least += column.min_width + _GAP
        if column.no_wrap:
            continue
        column.overflow = "fold"
        for one in cells:
            if isinstance(one, Text):
                one.no_wrap, one.overflow = False, "fold"
    return max(width, least)


@dataclass(frozen=True)
class FittedCell:
    """A cell whose names are cut in the middle where its column is too narrow: both of their ends identify them.

    Attributes:
        text: The text.
        wraps: It goes on in the next line between words.
    """

    text: Text
    wraps: bool = False

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Returns the minimum and preferred width of the cell."""
        width = self.text.cell_len
        return Measurement(min(width, _LEAST_WIDTH if self.wraps else 6), width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it with names as long as fit."""
        plain, most = self.text.plain, options.max_width
        plain = re.sub(r"\S+" if self.wraps else r".+", lambda name: elided(name[0], most), plain)
        yield Text(plain, style=self.text.style, no_wrap=not self.wraps, overflow="crop")


def draw(facts: FactTable, width: int, *, has_bars: bool) -> Table:
    """Draws a table of facts, without the columns that text of a width has no room for."""
    places = [place for place, one in enumerate(facts.columns) if not one.is_wide and (has_bars or not one.is_bar)]
    widths = {place: _least_width(facts, place, width) + _GAP for place in places}
    for place in sorted(places, key=lambda place: -facts.columns[place].gives_way):
        if facts.columns[place].gives_way and sum(widths.values()) - _GAP > width:
            places.remove(place)
            del widths[place]
    columns = [facts.columns[place] for place in places]
    has_room = sum(widths.values()) - _GAP <= width
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim", show_edge=False)
    for place, column in zip(places, columns, strict=True):
        if column.unit.is_number and not column.is_bar:
            table.add_column(Text(column.heading or ""), justify="right", no_wrap=True)
        else:
            least = widths[place] - _GAP if has_room else None
            table.add_column(Text(column.heading or ""), overflow="ellipsis", min_width=least)
    for row in facts.rows:
        found = zip(places, columns, strict=True)
        cells = (_draw_cell(row.cells[place], column, row.kind, is_cut=has_bars) for place, column in found)
        table.add_row(*cells, style="bold" if row.kind == "total" else "")
    return table


def _least_width(facts: FactTable, place: int, width: int) -> int:
    """Returns the width a column has while others can give way: that of its numbers, of words a fifth of the page."""
    column = facts.columns[place]
    if column.is_bar:
        return _BAR_WIDTH
    texts = (column.heading or "", *(row.cells[place].text for row in facts.rows))
    natural = max(cell_len(printable(text)) for text in texts)
    return natural if column.unit.is_number else min(natural, max(_LEAST_WIDTH, width // 5))


def _draw_cell(found: Cell, column: Column, kind: str, *, is_cut: bool) -> RenderableType:
    colour = _COLOURS.get(found.category, "") or _TONES.get(found.tone, "")
    if column.is_bar:
        return Text("█" * round(_BAR_WIDTH * found.bar), style=colour)
    if column.unit.is_whole_line and not kind:
        return FittedCell(Text(printable(found.text)))
    style = "dim" if kind == "rest" and not column.unit.is_number else ""
    text = "  " * found.depth + found.text
    drawn = Text(printable(text), style=colour or style)
    is_sentence = column.unit.wraps and not column.unit.has_names
    if is_cut and not (column.unit.is_number or is_sentence or found.soft or found.lines):
        return FittedCell(drawn, column.unit.wraps)
    if is_sentence:
        drawn.overflow = "fold"
    if not column.unit.wraps:  # on a narrow terminal; in a pipe everything is wrapped
        drawn.no_wrap, drawn.overflow = True, "ellipsis"
    if found.soft:
        drawn.append(f" {printable(found.soft)}", style="dim")
    for line in found.lines:
        drawn.append(f"\n{printable(line)}", style="dim")
    return drawn


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 24px auto; padding: 0 16px; }}
h1 {{ font-size: 20px; }} h2 {{ font-size: 15px; margin-top: 24px; }}
table {{ border-collapse: collapse; }} th, td {{ padding: 2px 14px 2px 0; border-bottom: 1px solid #8886; }}
th {{ text-align: left; }} td {{ overflow-wrap: anywhere; vertical-align: top; }}
.number {{ text-align: right; white-space: nowrap; }}
.fail {{ color: #d1242f; font-weight: 600; }} .warn {{ color: #9a6700; }} .pass {{ color: #1a7f37; }}
svg {{ width: 100%; height: auto; }} text {{ font-size: 12px; fill: currentColor; }} line {{ stroke: #8886; }}
polyline {{ fill: none; stroke: #0969da; stroke-width: 2; }}
circle {{ fill: #0969da; }} circle.changed {{ fill: #d1242f; }}
</style></head><body>
{body}
</body></html>
"""


def html_page(title: str, body: str) -> str:
    """Returns a page."""
    return _PAGE.format(title=escape(title), body=body)


def html_table(facts: FactTable, short: Callable[[str], str] = str) -> str:
    """Returns a table of facts."""
    kinds = [' class="number"' if column.unit.is_number else "" for column in facts.columns]

    def lines(cell: Cell) -> str:
        return "<br>".join(escape(short(line)) for line in (cell.text, *cell.lines))

    head = "".join(
        f"<th{kind}>{escape(column.heading or '')}</th>" for column, kind in zip(facts.columns, kinds, strict=True)
    )
    rows = (
        "".join(f"<td{kind}>{lines(cell)}</td>" for cell, kind in zip(row.cells, kinds, strict=True))
        for row in facts.rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
