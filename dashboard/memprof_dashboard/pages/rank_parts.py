"""Parts of the page Ranks: the device mesh, and tables of the recording's rank summaries."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update

from memprof.analysis.ranks.rank_report import RankComparison, Spread, compare_ranks, job_notes
from memprof.analysis.ranks.stragglers import Stragglers, find_stragglers
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_bytes_change, format_percent, format_us
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.ranks import mesh_figure
from memprof_dashboard.figures.shared import CONFIG, message
from memprof_dashboard.page import theme_of
from memprof_dashboard.palette import fill_of
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
_ROW_PX, _LEAST_PX, _MOST_PX = 34, 150, 720
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
            dcc.Graph(id=_GRAPH, config=CONFIG, responsive=True, style={"height": f"{_height(mesh)}px"}),
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
        if whole is None:
            return no_update, no_update, no_update
        try:
            trace = workspace.source(View.from_json(whole).trace).trace
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
        return figure, {"height": f"{_height(mesh)}px"}, words.strip()

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


def _height(mesh: Mesh) -> int:
    return min(max(_ROW_PX * mesh.rows + 90, _LEAST_PX), _MOST_PX)


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
        shown += _section(title, _spreads(spreads, head))
    shown += _section("Stragglers at collectives", _stragglers(found), found.describe_clocks())
    return shown


def peaks_of_many(compared: RankComparison, button: Any) -> Any:
    """Returns the table of the ranks with the highest peaks.

    Args:
        compared: The ranks.
        button: Makes the button that goes to a rank, of its number.
    """
    known = [one for one in compared.ranks if one.peak_bytes is not None]
    ordered = sorted(known, key=lambda one: (-(one.peak_bytes or 0), one.rank))
    median = 0 if compared.peak is None else compared.peak.median
    rows = [
        [
            button(one.rank),
            parts.name(one.node, 40),
            html.Span(format_bytes(one.peak_bytes or 0), title=f"{one.peak_bytes:,} bytes"),
            format_bytes_change((one.peak_bytes or 0) - median),
            one.phase,
            parts.name(one.module, 40),
        ]
        for one in ordered[:MOST_RANKS]
    ]
    heads = ["rank", "node", ">peak", ">vs median", "phase", "module"]
    return parts.table(heads, rows, label=f"{len(rows)} highest peaks of {len(compared.ranks):,} ranks")


def _section(title: str, rows: Any, remark: str = "") -> list[Any]:
    if rows is None:
        return []
    return [html.H3(title, className="ranks-title"), *([parts.note(remark)] if remark else []), rows]


def _spreads(spreads: tuple[Spread, ...], head: str) -> Any:
    rows = [
        [
            parts.name(fill_of(one.name).label if head == "category" else one.name or "(outside any module)", 60),
            format_bytes(one.least),
            format_bytes(one.median),
            format_bytes(one.most),
            format_bytes(one.bytes),
            f"rank {one.most_rank}",
        ]
        for one in spreads
        if one.bytes
    ]
    if not rows:
        return None
    heads = [head, ">lowest", ">median", ">highest", ">spread", "highest on"]
    return parts.table(heads, rows[:MOST_ROWS], label=f"spread of ranks by {head}")


def _stragglers(found: Stragglers) -> Any:
    rows = [
        [
            f"rank {one.rank}",
            f"{one.times_last:,} of {one.collectives:,}, {format_percent(one.times_last / one.collectives)}",
            format_us(one.kept_waiting_us),
            format_us(one.waited_us),
        ]
        for one in found.ranks
        if one.times_last
    ]
    if not rows:
        return None
    heads = ["rank", ">arrived last", ">behind median", ">own wait"]
    return parts.table(heads, rows[:MOST_ROWS], label="stragglers at collectives")
