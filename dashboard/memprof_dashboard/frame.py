"""What stays on the page: the recordings, their figures at a glance, the timeline, and what is under the cursor."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
from dash import Dash, Input, Output, Patch, State, ctx, dcc, html, no_update

from memprof.errors import UsageError
from memprof.replay.history import History
from memprof.trace.schema import Ints
from memprof.units import format_bytes, format_us, parse_bytes
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.base import CONFIG
from memprof_dashboard.figures.timeline import Marks, cursor_line, draw, overview, timeline
from memprof_dashboard.page import or_message, or_sentence, theme_of
from memprof_dashboard.palette import fill_of
from memprof_dashboard.reactions import shown
from memprof_dashboard.search import storages_found
from memprof_dashboard.sources import Desk, Rank
from memprof_dashboard.state import View

_MOST_TABLE_ROWS = 200
#: Where the cursor is in the timeline that was drawn last; None while there is none.
_DRAWN_AT = "drawn-at"
_OVERVIEW = {"height": "56px"}
_TIMELINE = {"height": "var(--timeline-height)"}


def layout(desk: Desk) -> html.Div:
    """Returns the components above the pages."""
    options = [{"label": source.name, "value": place} for place, source in enumerate(desk.sources)]
    ranks = [{"label": f"rank {number}", "value": number} for number in desk.sources[0].trace.ranks]
    has_ranks = any(len(source.trace.ranks) > 1 for source in desk.sources)
    is_single = len(options) == 1
    return html.Div(
        [
            html.Header(
                [
                    html.Span("memprof", className="brand"),
                    _chosen("recording", dcc.Dropdown(options, 0, id=ids.TRACE, clearable=False), is_hidden=is_single),
                    html.Span(desk.sources[0].name, className="only", hidden=not is_single),
                    _chosen("rank", dcc.Dropdown(ranks, None, id=ids.RANK), is_hidden=not has_ranks),
                    _chosen(
                        "beside it",
                        dcc.Dropdown([{"label": "none", "value": -1}, *options], -1, id=ids.OTHER, clearable=False),
                        is_hidden=is_single,
                    ),
                    _chosen(
                        "find",
                        dcc.Input(
                            id=ids.FIND,
                            type="search",
                            debounce=0.4,
                            placeholder="module, operator or file",
                            maxLength=200,
                        ),
                    ),
                    _chosen(
                        "budget",
                        dcc.Input(id=ids.BUDGET, type="text", debounce=True, placeholder="24GiB or 60%", maxLength=40),
                    ),
                    html.Button("theme", id=ids.THEME_BUTTON, title="light or dark", type="button"),
                ],
                id=ids.HEADER,
            ),
            html.Div(id=ids.FACTS, className="facts"),
            html.Div(id=ids.NOTE, role="status"),
            dcc.Store(id=_DRAWN_AT),
            html.Div(
                [
                    *(
                        html.Button(label, id=name, title=title, type="button")
                        for label, name, title in (
                            ("to the peak", ids.PEAK_BUTTON, "of what is shown (P)"),
                            ("+", ids.IN_BUTTON, "zoom in (+)"),
                            ("\N{MINUS SIGN}", ids.OUT_BUTTON, "zoom out (-)"),
                            ("all", ids.ALL_BUTTON, "show everything (Home)"),
                            ("download", ids.DOWNLOAD_BUTTON, "what the timeline shows, as CSV"),
                        )
                    ),
                    html.Span(
                        "drag to zoom, click to see what is alive, ← → by operator, with shift by step",
                        className="hint",
                    ),
                ],
                className="tools",
            ),
            dcc.Graph(id=ids.OVERVIEW, config=CONFIG | {"displayModeBar": False}, responsive=True, style=_OVERVIEW),
            dcc.Graph(id=ids.TIMELINE, config=CONFIG, responsive=True, style=_TIMELINE),
            dcc.Graph(id=ids.TIMELINE_OTHER, config=CONFIG, responsive=True, style={"display": "none"}),
            html.Div(id=ids.TIMELINE_TABLE),
            html.Div(id=ids.READOUT, className="readout", role="status"),
        ],
        className="frame",
    )


def _chosen(label: str, control: Any, *, is_hidden: bool = False) -> html.Label:
    return html.Label([html.Span(label), control], hidden=is_hidden, className="control")


def register(app: Dash, desk: Desk) -> None:
    """Adds the callbacks that draw it."""

    @app.callback(Output(ids.FACTS, "children"), Input(ids.WINDOW, "data"))
    @or_sentence
    def show_facts(window: Any) -> Any:
        if window is None:
            return no_update
        view = View.from_json(window)
        return _facts(desk.rank(view.trace, view.rank), view)

    @app.callback(
        Output(ids.TIMELINE, "figure"),
        Output(_DRAWN_AT, "data"),
        Input(ids.WINDOW, "data"),
        Input(ids.THEME, "data"),
        State(ids.VIEW, "data"),
    )
    def draw_timeline(window: Any, theme: Any, whole: Any) -> Any:
        if window is None:
            return no_update, no_update
        view, at = View.from_json(window), View.from_json(whole).at
        return or_message(_timeline)(desk, view, at, theme), at

    @app.callback(
        Output(ids.TIMELINE_OTHER, "figure"),
        Output(ids.TIMELINE_OTHER, "style"),
        Input(ids.WINDOW, "data"),
        Input(ids.THEME, "data"),
    )
    def draw_other(window: Any, theme: Any) -> Any:
        view = View.from_json(window)
        if window is None or view.other < 0:
            return no_update, {"display": "none"}
        return or_message(_timeline_beside)(desk, view, theme), _TIMELINE

    @app.callback(Output(ids.OVERVIEW, "figure"), Input(ids.WINDOW, "data"), Input(ids.THEME, "data"))
    @or_message
    def draw_overview(window: Any, theme: Any) -> Any:
        if window is None:
            return no_update
        view = View.from_json(window)
        rank = desk.rank(view.trace, view.rank)
        now = shown(view, rank)
        return overview(rank.history, now.first, now.end, theme_of(theme))

    # Waits for a picture that is under way, which may have the cursor where it was before.
    @app.callback(
        Output(ids.TIMELINE, "figure", allow_duplicate=True),
        Input(ids.CURSOR, "data"),
        Input(_DRAWN_AT, "data"),
        State(ids.THEME, "data"),
        prevent_initial_call=True,
    )
    def move_cursor(cursor: Any, drawn_at: Any, theme: Any) -> Any:
        at = View.from_json(cursor).at
        is_there = at == drawn_at and list(ctx.triggered_prop_ids.values()) == [_DRAWN_AT]
        if cursor is None or drawn_at is None or is_there:
            return no_update
        patch = Patch()
        patch["layout"]["shapes"][0] = cursor_line(at, theme_of(theme))
        return patch

    @app.callback(Output(ids.READOUT, "children"), Input(ids.CURSOR, "data"))
    @or_sentence
    def read_out(cursor: Any) -> Any:
        if cursor is None:
            return no_update
        view = View.from_json(cursor)
        return _readout(desk.rank(view.trace, view.rank), view)

    @app.callback(Output(ids.TIMELINE_TABLE, "children"), Input(ids.WINDOW, "data"))
    @or_sentence
    def tabulate(window: Any) -> Any:
        if window is None:
            return no_update
        view = View.from_json(window)
        heads, rows = _rows(desk.rank(view.trace, view.rank), view, _MOST_TABLE_ROWS)
        return parts.as_table(heads, rows, label="what the timeline shows")

    @app.callback(
        Output(ids.DOWNLOAD, "data"),
        Input(ids.DOWNLOAD_BUTTON, "n_clicks"),
        State(ids.VIEW, "data"),
        prevent_initial_call=True,
    )
    def download(clicks: Any, whole: Any) -> Any:
        if not clicks:
            return no_update
        view = View.from_json(whole)
        heads, rows = _rows(desk.rank(view.trace, view.rank), view, None)
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow([head.removeprefix(">") for head in heads])
        writer.writerows(rows)
        return {"content": text.getvalue(), "filename": "memprof-timeline.csv", "type": "text/csv"}


def budget_of(text: str, peak_bytes: int) -> int:
    """Reads a budget line; 0 where there is none or it makes no sense."""
    try:
        if text.strip().endswith("%"):
            return int(peak_bytes * float(text.strip().removesuffix("%")) / 100)
        return parse_bytes(text) if text.strip() else 0
    except (UsageError, ValueError, OverflowError):
        return 0


def _timeline(desk: Desk, view: View, at: int, theme: Any) -> Any:
    rank = desk.rank(view.trace, view.rank)
    history, now = rank.history, shown(view, rank)
    if not history.ops:
        return _nothing(theme)
    most = 0
    if view.other >= 0:
        beside = desk.rank(view.other, view.rank)
        if beside.history.ops:
            most = int(beside.history.total[slice(*_stretch_of(beside, rank, now.first, now.end))].max())
    found = storages_found(rank, view.find)
    searched: Ints | None = None if found is None else history.bytes_of(found)
    marks = Marks(
        at=at if at >= 0 else now.at,
        budget_bytes=budget_of(view.budget, int(history.total[now.first : now.end].max())),
        capacity_bytes=_capacity(rank, history),
        most_bytes=most,
        searched=searched,
    )
    return timeline(history, now.first, now.end, theme_of(theme), marks)


def _timeline_beside(desk: Desk, view: View, theme: Any) -> Any:
    rank, beside = desk.rank(view.trace, view.rank), desk.rank(view.other, view.rank)
    now = shown(view, rank)
    if not beside.history.ops:
        return _nothing(theme)
    first, end = _stretch_of(beside, rank, now.first, now.end)
    most = int(rank.history.total[now.first : now.end].max()) if rank.history.ops else 0
    return timeline(beside.history, first, end, theme_of(theme), Marks(most_bytes=most))


def _stretch_of(beside: Rank, rank: Rank, first: int, end: int) -> tuple[int, int]:
    """Returns the stretch of another recording that goes with one: the steps of the same numbers, or all of it."""
    steps = rank.history.step[first:end]
    low, high = int(steps.min()), int(steps.max())
    inside = np.flatnonzero((beside.history.step >= low) & (beside.history.step <= high))
    return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, beside.history.ops)


def _nothing(theme: Any) -> Any:
    from memprof_dashboard.figures.base import message

    return message("No operators were recorded.", theme_of(theme))


def _capacity(rank: Rank, history: History) -> int:
    """Returns the device's memory where it is near enough to the peak to be drawn."""
    machine = rank.trace.manifest.machine
    if machine.device_kind == "cpu" or not history.ops:
        return 0
    return machine.capacity_bytes if machine.capacity_bytes < 3 * int(history.total.max()) else 0


def _facts(rank: Rank, view: View) -> Any:
    """Returns the figures at a glance: the peak, where, how far from the budget, what is biggest, what is missing."""
    history, manifest = rank.history, rank.trace.manifest
    if not history.ops:
        return parts.empty(
            "No operators", f"{rank.trace.path.name} holds no operators: the job ran no step in its window."
        )
    now = shown(view, rank)
    peak = history.peak(now.first, now.end)
    size = int(history.total[peak])
    split = {name: int(history.alive_bytes(name, np.array([peak]))[0]) for name in history.categories}
    largest = max(split, key=lambda name: split[name])
    facts = [
        _fact("peak", format_bytes(size), f"{size:,} bytes, in what is shown"),
        _fact(
            "where", f"step {history.step[peak]}, {_phase(history, peak)}", rank.module_title(int(history.module[peak]))
        ),
        _fact("most of it", f"{fill_of(largest).label} {format_bytes(split[largest])}", f"{split[largest] / size:.0%}"),
    ]
    budget = budget_of(view.budget, size)
    if budget:
        over = size - budget
        facts.append(
            _fact("over budget" if over > 0 else "below budget", format_bytes(abs(over)), format_bytes(budget))
        )
    machine = manifest.machine
    if machine.device_kind != "cpu" and machine.capacity_bytes:
        left = machine.capacity_bytes - size
        facts.append(_fact("device", format_bytes(machine.capacity_bytes), f"{format_bytes(left)} beside the peak"))
    plain = rank.steps.duration_us[(rank.steps.kind == "plain") & rank.steps.is_complete]
    if len(plain) and np.isfinite(np.nanmedian(plain)):
        facts.append(_fact("step time", format_us(float(np.nanmedian(plain))), "without the recorder"))
    facts.append(_fact("recorded", machine.device_name or machine.device_kind, f"torch {manifest.torch_version}"))
    remarks = [] if manifest.capture.is_complete else [_incomplete(rank)]
    return [*facts, *remarks]


def _incomplete(rank: Rank) -> Any:
    capture = rank.trace.manifest.capture
    place = f" in {capture.ends_at}" if capture.ends_at else ""
    return parts.note(f"This recording ended early{place}: {capture.reason or 'it was cut short'}.")


def _fact(label: str, value: str, detail: str) -> html.Div:
    return html.Div(
        [html.Span(label, className="label"), html.Strong(parts.name(value, 40)), html.Span(parts.name(detail, 44))],
        className="fact",
    )


def _phase(history: History, op_id: int) -> str:
    return history.phases[history.phase[op_id]] or "other"


def _readout(rank: Rank, view: View) -> Any:
    history = rank.history
    if not history.ops:
        return ""
    at = shown(view, rank).at
    module = rank.module_title(int(history.module[at]))
    stack = int(rank.op_stacks[at])
    line = rank.sources.of_stack(stack)
    return [
        html.Strong(format_bytes(int(history.total[at]))),
        f" during operator {at:,}: ",
        parts.name(str(rank.op_names[at])),
        f", {_phase(history, at)} of step {history.step[at]}",
        *([", in ", parts.name(module)] if module else []),
        *([", ", parts.name(line.place)] if line is not None else []),
    ]


def _rows(rank: Rank, view: View, most: int | None) -> tuple[list[str], list[list[Any]]]:
    """Returns what the timeline shows as rows: the fullest ones where ``most`` limits them."""
    history, now = rank.history, shown(view, rank)
    if not history.ops:
        return ["operator"], []
    op_ids = draw(history.total, now.first, now.end).op_ids
    if most is not None and len(op_ids) > most:
        op_ids = np.sort(op_ids[np.argsort(history.total[op_ids], kind="stable")[-most:]])
    split = [history.alive_bytes(name, op_ids) for name in history.categories]
    heads = [
        ">operator",
        ">step",
        "phase",
        "name",
        ">total bytes",
        *(f">{fill_of(name).label}" for name in history.categories),
    ]
    rows = [
        [
            int(op_id),
            int(history.step[op_id]),
            _phase(history, op_id),
            str(rank.op_names[op_id]),
            int(history.total[op_id]),
            *(int(values[row]) for values in split),
        ]
        for row, op_id in enumerate(op_ids.tolist())
    ]
    return heads, rows
