"""The header: which recordings and ranks are open, the search, the budget, and buttons for theme and help."""

from __future__ import annotations

from typing import Any

from dash import dcc, html

from memprof_dashboard import ids
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View


def header(workspace: Workspace) -> html.Header:
    """Returns the header's controls."""
    has_ranks = any(len(source.trace.ranks) > 1 for source in workspace.sources)
    return html.Header(
        [
            html.Span("memprof", className="brand"),
            html.Span(recording_choices(workspace, View()), id=ids.RECORDINGS, className="recordings"),
            _chosen("rank", dcc.Dropdown(rank_options(workspace, 0), None, id=ids.RANK), is_hidden=not has_ranks),
            html.Span(id=ids.BADGE, className="badge", role="status"),
            html.Span(className="spring"),
            _chosen(
                "find",
                dcc.Input(
                    id=ids.FIND,
                    type="search",
                    debounce=0.4,
                    placeholder="module, operator, file",
                    maxLength=200,
                ),
            ),
            _chosen(
                "budget",
                dcc.Input(id=ids.BUDGET, type="text", debounce=True, placeholder="24GiB or 60%", maxLength=40),
            ),
            icon_button("◐", ids.THEME_BUTTON, "switch between light and dark"),
            icon_button("?", ids.HELP_BUTTON, "keys (?)"),
        ],
        id=ids.HEADER,
    )


def recording_choices(workspace: Workspace, view: View) -> list[Any]:
    """Returns the controls that choose recordings; with a single one, its name."""
    options = [{"label": source.name, "value": place} for place, source in enumerate(workspace.sources)]
    is_single = len(options) == 1
    others = [{"label": "none", "value": -1}, *options]
    return [
        _chosen("recording", dcc.Dropdown(options, view.trace, id=ids.TRACE, clearable=False), is_hidden=is_single),
        html.Span(workspace.sources[0].name, className="only", hidden=not is_single),
        _chosen("compare with", dcc.Dropdown(others, view.other, id=ids.OTHER, clearable=False), is_hidden=is_single),
        html.Button("⇄", id=ids.SWAP_BUTTON, title="swap the two recordings", type="button", hidden=is_single),
    ]


def rank_options(workspace: Workspace, place: int) -> list[Any]:
    """Returns the choices of ranks of a recording."""
    return [{"label": f"rank {number}", "value": number} for number in workspace.source(place).trace.ranks]


def icon_button(label: str, name: str, title: str) -> html.Button:
    """Returns a quiet button; a single character on it is named by its title."""
    labelled: Any = {"aria-label": title} if len(label) == 1 else {}
    return html.Button(label, id=name, title=title, type="button", className="quiet", **labelled)


def _chosen(label: str, control: Any, *, is_hidden: bool = False) -> html.Label:
    return html.Label([html.Span(label), control], hidden=is_hidden, className="control")
