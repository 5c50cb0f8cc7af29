"""The dialog that lists the keys."""

from __future__ import annotations

from typing import Any

from dash import html

from memprof_dashboard import ids

_KEYS = (
    ("← →", "move the cursor by one operator; with Shift, to the same position in the next or previous step"),
    ("P", "move the cursor to the peak of the visible range"),
    ("+ \N{MINUS SIGN}", "zoom in or out around the cursor"),
    ("Home", "show everything"),
    ("/", "find"),
    ("T  F  M", "live tensors as a table, a flame graph, a treemap"),
    ("1 to 9", "open a page below the timeline"),
    ("Esc", "close this, or clear the selected storage and the search"),
    ("?", "this list"),
)


def help_dialog() -> html.Dialog:
    """Returns the dialog, closed; ``assets/memprof.js`` opens it."""
    labelled: Any = {"aria-label": "keys"}
    rows = [part for keys, text in _KEYS for part in (html.Dt(html.Kbd(keys)), html.Dd(text))]
    return html.Dialog(
        [
            html.H2("Keys"),
            html.Dl(rows),
            html.P("The address holds the whole view: copy it to share what you see."),
            html.Button("Close", type="button", className="close-help"),
        ],
        id=ids.HELP,
        **labelled,
    )
