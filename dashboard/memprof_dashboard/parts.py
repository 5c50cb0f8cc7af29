"""Small parts of a page: states without content, tables, and lines of text. Names from a trace are children only.

Whatever stands as a child of a component is text to the browser, never markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dash import html

#: Longest name that a table shows; the whole one is in its tooltip.
_LONGEST = 90


def empty(title: str, sentence: str) -> html.Div:
    """Returns what stands where a view has nothing to show."""
    return html.Div([html.H3(title), html.P(sentence)], className="state empty", role="status")


def error(sentence: str) -> html.Div:
    """Returns what stands where a view cannot be shown."""
    return html.Div([html.H3("This cannot be shown"), html.P(sentence)], className="state error", role="alert")


def note(sentence: str) -> html.P:
    """Returns a remark, such as on what was left out."""
    return html.P(sentence, className="note")


def name(text: str, longest: int = _LONGEST) -> html.Span:
    """Returns a name from a trace, cut in the middle where it is long."""
    if len(text) <= longest:
        return html.Span(text, className="name")
    return html.Span(f"{text[: longest // 2]}…{text[-longest // 2 :]}", title=text[:2000], className="name")


def table(heads: Sequence[str], rows: Iterable[Any], *, label: str, **attributes: Any) -> html.Div:
    """Returns a table; heads that begin with ``>`` are of columns of numbers. A row is cells, or a ``Tr``."""
    labelled: Any = {"aria-label": label}
    numeric = [head.startswith(">") for head in heads]
    return html.Div(
        html.Table(
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
        ),
        className="table",
        **attributes,
    )


def as_table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, label: str) -> html.Details:
    """Returns the table of what a plot shows, folded away below it."""
    return html.Details([html.Summary("view as table"), table(heads, rows, label=label)], className="as-table")
