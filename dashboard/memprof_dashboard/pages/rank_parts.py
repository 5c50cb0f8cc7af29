"""Parts of the page Ranks: the device mesh, and tables of the recording's rank summaries."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update

from memprof.analysis.ranks import rank_tables as tables
from memprof.analysis.ranks.rank_report import RankComparison, compare_ranks, job_notes
from memprof.analysis.ranks.stragglers import find_stragglers
from memprof.analysis.table import FactTable
from memprof.trace.store import Trace
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.ranks import mesh_figure
from memprof_dashboard.figures.shared import message
from memprof_dashboard.page import theme_of, view_of
from memprof_dashboard.sources import MemprofError, Workspace
from memprof_dashboard.state import View
from memprof_dashboard.views.mesh import (
    Mesh,
    default_mesh,
    describe_differences,
    describe_worst,
    peaks_on,
    read_mesh,
    represented,
    with_same_ranks,
)

_GRAPH, _TEXT, _REMARK = "mesh-graph", "mesh-text", "mesh-remark"
_ROW_PX, _COLUMN_PX, _LEAST_PX, _MOST_PX = 34, 120, 150, 720
#: Maximum rows of a table.
MOST_ROWS = 12
#: Ranks in the table of many.
MOST_RANKS = 40


def layout(trace: Trace) -> Any:
    """Returns the mesh's part of the page."""
    try:
        compared = compare_ranks(trace)
    except MemprofError as error:
        return parts.error(str(error))
    mesh = default_mesh(compared.ranks, _world_size(trace, compared))
    return html.Div(
        [
            html.Label(
                [
                    "mesh ",
                    dcc.Input(id=_TEXT, type="text", debounce=True, value="", placeholder=str(mesh), maxLength=80),
                ],
                title="dimensions and their sizes, the outermost first, as in init_device_mesh: pp=2, dp=4, tp=8",
                className="mesh-input",
            ),
            html.P(id=_REMARK, className="ranks-verdict"),
            parts.graph(_GRAPH, style=_size(mesh)),
        ],
        className="mesh",
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Registers the callbacks."""

    @app.callback(
        Output(_GRAPH, "figure"),
        Output(_GRAPH, "style"),
        Output(_REMARK, "children"),
        Input(_TEXT, "value"),
        Input(ids.THEME, "data"),
        State(ids.VIEW, "data"),
    )
    def draw(text: Any, theme: Any, whole: Any) -> Any:
        try:
            trace = workspace.source(view_of(whole).trace).trace
            compared = compare_ranks(trace)
            world_size = _world_size(trace, compared)
            is_typed = isinstance(text, str) and text.strip()
            mesh = read_mesh(text, world_size) if is_typed else default_mesh(compared.ranks, world_size)
        except MemprofError as error:
            return message("No mesh to draw.", theme_of(theme)), no_update, parts.error(str(error))
        ranks = with_same_ranks(trace, compared.ranks)
        peaks = peaks_on(mesh, ranks)
        figure = mesh_figure(mesh, ranks, peaks, compared.worst, theme_of(theme))
        # Of a single dimension the verdict on the ranks says as much.
        words = f"{describe_worst(mesh, peaks)} {describe_differences(mesh, peaks)}" if len(mesh.names) > 1 else ""
        return figure, _size(mesh), words.strip()

    @app.callback(
        Output(ids.GO, "data", allow_duplicate=True),
        Input(_GRAPH, "clickData"),
        State(ids.VIEW, "data"),
        prevent_initial_call=True,
    )
    def go(click: Any, whole: Any) -> Any:
        try:
            number = int(click["points"][0]["customdata"])
        except (KeyError, IndexError, TypeError, ValueError):
            return no_update
        trace = workspace.source(View.from_json(whole).trace).trace
        known = next((rank for rank in trace.ranks if number in (rank, *represented(trace, rank))), None)
        return no_update if known is None else {"rank": known, "storage": -1}


def _world_size(trace: Trace, compared: RankComparison) -> int:
    """Returns the ranks of the job, also of those that left no recording."""
    return max(trace.manifest.world_size, 1 + max(one.rank for one in compared.ranks))


def _size(mesh: Mesh) -> dict[str, str]:
    height = min(max(_ROW_PX * mesh.rows + 90, _LEAST_PX), _MOST_PX)
    return {"height": f"{height}px", "width": f"min(100%, {_COLUMN_PX * mesh.columns + 100}px)"}


def summed_up(trace: Trace) -> list[Any]:
    """Returns the tables that work for any number of ranks.

    Raises:
        BadInputError: A table of the recording is damaged.
    """
    compared, found = compare_ranks(trace), find_stragglers(trace)
    shown: list[Any] = [parts.note(note) for note in job_notes(trace)]
    for title, spreads, head in (
        ("Spread by phase", compared.phases, "phase"),
        ("Spread by category", compared.categories, "category"),
        ("Spread by module", compared.modules, "module"),
    ):
        shown += _section(title, tables.spreads(spreads, head, MOST_ROWS), f"spread of ranks by {head}")
    late = tables.stragglers(found, MOST_ROWS)
    shown += _section("Stragglers at collectives", late, "stragglers at collectives", found.describe_clocks())
    waits = tables.late_collectives(found, MOST_ROWS)
    shown += _section("Longest waits at collectives", waits, "longest waits at collectives")
    return shown


def _section(title: str, table: FactTable, label: str, remark: str = "") -> list[Any]:
    if not table:
        return []
    notes = [parts.note(remark)] if remark else []
    return [html.H3(title, className="ranks-title"), *notes, parts.facts(table, label=label)]
