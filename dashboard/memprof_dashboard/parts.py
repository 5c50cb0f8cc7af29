"""Small parts of a page: states without content, tables, and lines of text. Names from a trace are children only.

The browser treats children of a component as text, never as markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from memprof.analysis.table import Cell, FactTable
from memprof_dashboard.figures.shared import CONFIG
from memprof_dashboard.markup import shorten
from memprof_dashboard.palette import fill_of

#: A number and its unit.
_QUANTITY = re.compile("([+\N{MINUS SIGN}-]?\\d[\\d.,]* (?:(?:[KMGT]i)?B\\b|[mu]?s\\b|%))")
#: Longest name shown in a table; the tooltip holds the full name.
_LONGEST = 90
#: Longest sentence in one.
_LONGEST_WORDS = 400


def empty(title: str, sentence: str) -> html.Div:
    """Returns the placeholder of a view with nothing to show."""
    return html.Div([html.H3(title), html.P(sentence)], className="state empty", role="status")


def missing_other(count: int, other: int, *, how_to_open: str, shows: str) -> html.Div | None:
    """Returns the placeholder of a page that compares two recordings; None where both are there.

    Args:
        count: Number of open recordings.
        other: Index of the one to compare with, negative for none.
        how_to_open: Sentence on how to open two.
        shows: What the page does with them, behind "this page".
    """
    if count < 2:
        return empty("Only one recording is open", how_to_open)
    if other < 0:
        sentence = f"Select one in the header, under “compare with”: this page {shows}."
        return empty("No second recording selected", sentence)
    return None


def error(sentence: str) -> html.Div:
    """Returns the placeholder of a view that cannot be shown."""
    return html.Div([html.H3("Cannot show this page"), html.P(sentence)], className="state error", role="alert")


def note(sentence: str) -> html.P:
    """Returns a note, such as on omitted rows."""
    return html.P(sentence, className="note")


def name(text: str, longest: int = _LONGEST) -> html.Span:
    """Returns a name from a trace, cut in the middle where it is long."""
    if len(text) <= longest:
        return html.Span(text, className="name")
    return html.Span(shorten(text, longest), title=text[:2000], className="name")


def sentence(text: str, longest: int) -> html.Span:
    """Returns a sentence with no line break between a number and its unit; cut in the middle where it is long."""
    shown = shorten(text, longest)
    pieces = [
        html.Span(piece, className="whole") if place % 2 else piece
        for place, piece in enumerate(_QUANTITY.split(shown))
    ]
    return html.Span(pieces, title=text[:2000] if shown != text else None, className="name")


def with_code(text: str, longest: int = _LONGEST) -> html.Span:
    """Returns a text from a trace in which what stands between two backticks is code."""
    pieces = shorten(text, longest).split("`")
    if len(pieces) % 2 == 0:  # a backtick without a second one is a part of a name
        return name(text, longest)
    marked = [html.Code(piece) if place % 2 else piece for place, piece in enumerate(pieces)]
    return html.Span(marked, title=text[:2000] if len(text) > longest else None, className="name")


def command(words: str) -> html.Code:
    """Returns a command, of which no word is broken where its line is: an option has hyphens of its own."""
    spaced = [part for word in words.split(" ") for part in (" ", html.Span(word, className="whole"))]
    return html.Code(spaced[1:])


def table(heads: Sequence[str], rows: Iterable[Any], *, label: str, kind: str = "table", **attributes: Any) -> html.Div:
    """Returns a table; heads that begin with ``>`` are of columns of numbers. A row is cells, or a ``Tr``.

    To dash it is one component, which the browser fills (``assets/memprof.js``): dash takes milliseconds for every
    component that it puts in, which are seconds for the cells of a table. So a cell is text or ``html`` components
    without an id. Where one has an id, the table is made of dash's components, and has to be short.
    """
    labelled: Any = {"aria-label": label}
    numeric = [head.startswith(">") for head in heads]
    whole = html.Table(
        [
            html.Thead(
                html.Tr(
                    [
                        html.Th(head.removeprefix(">"), scope="col", className="number" if is_number else None)
                        for head, is_number in zip(heads, numeric, strict=True)
                    ]
                )
            ),
            html.Tbody(
                [
                    row
                    if isinstance(row, html.Tr)
                    else html.Tr(
                        [
                            html.Td(cell, className="number" if is_number else None)
                            for cell, is_number in zip(row, numeric, strict=True)
                        ]
                    )
                    for row in rows
                ]
            ),
        ],
        **labelled,
    )
    if any(getattr(part, "id", None) is not None for part in whole._traverse()):  # type: ignore[no-untyped-call]  # dash's
        return html.Div(whole, className=kind, **attributes)
    drawn: Any = {"data-drawn": json.dumps(plain(whole), separators=(",", ":"), ensure_ascii=False)}
    return html.Div(className=kind, **drawn, **attributes)


def facts(found: FactTable, *, label: str, drawn: Mapping[str, Callable[[Any], Any]] | None = None) -> html.Div:
    """Returns a table of facts.

    Args:
        found: The table.
        label: Its name for readers.
        drawn: Draws the cells of some columns, by key, from what a row is about.
    """
    heads = [f"{'>' if column.unit.is_number else ''}{column.heading}" for column in found.columns]
    draw = [(drawn or {}).get(column.key) for column in found.columns]
    numeric = ["number" if column.unit.is_number else None for column in found.columns]
    rows = []
    for row in found.rows:
        cells = [
            fact(cell, _LONGEST_WORDS if column.unit.wraps else 64)
            if one is None or row.item is None
            else one(row.item)
            for cell, column, one in zip(row.cells, found.columns, draw, strict=True)
        ]
        tds = [html.Td(cell, className=kind) for cell, kind in zip(cells, numeric, strict=True)]
        rows.append(html.Tr(tds, className={"total": "sum"}.get(row.kind)))
    return table(heads, rows, label=label)


def fact(cell: Cell, longest: int = 64) -> Any:
    """Returns a cell of a table of facts, its text cut where it is longer."""
    if cell.category:
        fill = fill_of(cell.category)
        return [html.Span(className="swatch", style={"background": fill.colour}), name(fill.label, 40)]
    return html.Span(cell.text, title=cell.title) if cell.title else name(cell.text, longest) if cell.text else ""


def jump(label: str, *, title: str | None = None, **fields: Any) -> html.Button:
    """Returns a button that changes the view: fields of ``state.View``."""
    attributes: Any = {"data-go": json.dumps(fields)}
    return html.Button(label, type="button", title=title, **attributes)


def graph(name: str, height: str = "", *, has_bar: bool = True, **more: Any) -> dcc.Graph:
    """Returns the place of a figure, by its id and CSS height; without a bar, the tools of plotly are left out."""
    config = CONFIG if has_bar else CONFIG | {"displayModeBar": False}
    style: Any = {"style": {"height": height}} if height else {}
    return dcc.Graph(id=name, config=config, responsive=True, **style, **more)


def control(label: str, field: Any, *, is_hidden: bool = False) -> html.Label:
    """Returns a labelled control of a form."""
    return html.Label([html.Span(label), field], hidden=is_hidden, className="control")


def switch(name: str, options: dict[str, str], label: str) -> html.Fieldset:
    """Returns a row of buttons of which one is pressed, the first at the start; ``label`` names it for readers."""
    return html.Fieldset(
        [
            html.Legend(label, className="unseen"),
            dcc.RadioItems(
                [{"label": text, "value": value} for value, text in options.items()],
                next(iter(options)),
                id=name,
                inline=True,
                className="segmented",
            ),
        ]
    )


def plain(part: Any) -> Any:
    """Returns a component as ``[tag, attributes, parts]``, or text."""
    if not isinstance(part, Component):
        return "" if part is None else str(part)
    given: Any = part.to_plotly_json()  # type: ignore[no-untyped-call]  # dash has no types for it
    attributes = {key: value for key, value in given["props"].items() if value is not None}
    children = attributes.pop("children", [])
    children = children if isinstance(children, (list, tuple)) else [children]
    return [type(part).__name__.lower(), attributes, [plain(child) for child in children if child is not None]]


def as_table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, label: str) -> html.Details:
    """Returns the table of what a plot shows, folded away below it."""
    return html.Details([html.Summary("view as table"), table(heads, rows, label=label)], className="as-table")
