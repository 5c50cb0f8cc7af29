"""Fragmentation: memory that a device's allocator has reserved but cannot use."""

from __future__ import annotations

from typing import Any

import numpy as np
from dash import Dash, Input, Output, dcc, html, no_update

from memprof.trace.schema import NONE, Ints
from memprof.units import format_bytes, format_percent
from memprof_dashboard import ids, parts
from memprof_dashboard.figures.segments import segments
from memprof_dashboard.figures.shared import CONFIG
from memprof_dashboard.page import or_sentence, theme_of
from memprof_dashboard.palette import Theme
from memprof_dashboard.sources import Rank, Workspace
from memprof_dashboard.state import View
from memprof_dashboard.views.fragments import Fragments, read_fragments

_BODY = "segments-body"
_GRAPH = "segments-graph"
#: Segments drawn, and rows of the table, at most.
_MOST_SEGMENTS = 300
#: Free memory counts as scattered where its largest hole is a smaller fraction of it than this.
_SCATTERED = 0.5


class SegmentsPage:
    """The bars of the segments, and the fragmentation verdict."""

    TITLE = "Segments"

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns an empty page; a recording has one snapshot, so it follows neither window nor cursor."""
        return html.Div(id=_BODY)

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers the callback that fills it."""

        @app.callback(Output(_BODY, "children"), Input(ids.PLACE, "data"), Input(ids.THEME, "data"))
        @or_sentence
        def fill(place: Any, theme: Any) -> Any:
            if place is None:
                return no_update
            view = View.from_json(place)
            return _page(workspace.rank(view.trace, view.rank), theme_of(theme))


def _page(rank: Rank, theme: Theme) -> Any:
    fragments = read_fragments(rank.trace)
    if not len(fragments.segments):
        return _why_empty(rank)
    rows = _drawn(fragments)
    facts = [
        ("reserved", int(fragments.segments.total_size_bytes.sum()), f"{len(fragments.segments):,} segments"),
        ("allocated", int(fragments.allocated.sum()), "in use"),
        ("awaiting", int(fragments.awaiting.sum()), "freed, still in use by another stream"),
        ("free", int(fragments.free.sum()), "reserved, not in use"),
        ("largest hole", fragments.most_hole, "" if fragments.is_told else "upper bound: not all blocks are known"),
    ]
    left_out = len(fragments.segments) - len(rows)
    remark = f"{len(rows):,} of {len(fragments.segments):,} segments are drawn (the largest). " if left_out else ""
    return [
        html.P(verdict(fragments), className="segments-verdict"),
        html.Div([_fact(*fact) for fact in facts], className="facts"),
        dcc.Graph(
            id=_GRAPH,
            figure=segments(fragments, rows, theme),
            config=CONFIG,
            responsive=True,
            style={"height": "var(--segments-height)"},
        ),
        parts.note(f"{remark}Segments are shown as of the allocator's snapshot, independent of the cursor."),
        _table(fragments, rows),
    ]


def verdict(fragments: Fragments) -> str:
    """Returns whether free memory is usable: reserved but free bytes versus the largest hole."""
    free, hole = int(fragments.free.sum()), fragments.most_hole
    if not free:
        return "All reserved memory is in use: no fragmentation."
    share = f"{format_percent(hole / free)} of it"
    if fragments.is_told:
        text = (
            f"{format_bytes(free)} is reserved but free; the largest hole is {format_bytes(hole)} ({share}), so a "
            "larger tensor needs more memory from the device. "
        )
    else:
        text = (
            f"{format_bytes(free)} is reserved but free; the largest hole is at most {format_bytes(hole)} ({share}), "
            "as the recording does not contain all blocks. "
        )
    request = fragments.request_bytes
    if request > free:
        return (
            f"{text}The failed request was for {format_bytes(request)}, more than all free memory: the device is out "
            "of memory, not fragmented."
        )
    if request > hole:
        return (
            f"{text}The failed request was for {format_bytes(request)}: less than the free memory, but larger than any "
            "hole. This is fragmentation; expandable segments (--allocator expandable_segments) avoid it."
        )
    if hole < _SCATTERED * free:
        return f"{text}Free memory is scattered: this is fragmentation."
    if not fragments.is_told:
        return f"{text}Cannot determine whether this is fragmentation."
    return f"{text}Most free memory is contiguous: fragmentation is not the problem."


def _drawn(fragments: Fragments) -> Ints:
    """Returns the rows of the largest segments, by address."""
    total = fragments.segments.total_size_bytes
    rows: Ints = np.sort(np.argsort(-total, kind="stable")[:_MOST_SEGMENTS])
    return rows


def _fact(label: str, size: int, detail: str) -> html.Div:
    return html.Div(
        [
            html.Span(label, className="label"),
            html.Strong(format_bytes(size), title=f"{size:,} bytes"),
            html.Span(detail),
        ],
        className="fact",
    )


def _table(fragments: Fragments, rows: Ints) -> Any:
    table = fragments.segments
    body = [
        [
            f"{int(table.address[row]):#x}",
            parts.name(str(table.device[row]), 20),
            parts.name(str(table.segment_type[row]), 20),
            f"{int(table.total_size_bytes[row]):,}",
            f"{int(fragments.allocated[row]):,}",
            f"{int(fragments.awaiting[row]):,}",
            f"{int(fragments.free[row]):,}",
            "unknown" if fragments.hole[row] == NONE else f"{int(fragments.hole[row]):,}",
        ]
        for row in rows.tolist()
    ]
    heads = ["address", "device", "type", ">bytes", ">allocated", ">awaiting", ">free", ">largest hole"]
    return parts.as_table(heads, body, label="segments")


def _why_empty(rank: Rank) -> Any:
    if rank.trace.manifest.machine.device_kind == "cpu":
        return parts.empty(
            "No segments on CPU",
            "A device's allocator takes large segments and divides them, which can leave memory reserved but "
            "unusable. On CPU, the system allocates tensors one by one, so there are no segments to show. See "
            "Lifetimes for the holes between tensors; record the job on its device to see that one's segments.",
        )
    return parts.empty(
        "No segments recorded",
        "This recording contains no snapshot of the device's allocator, so reserved but unused memory is unknown. "
        "Lifetimes and the timeline show what is allocated.",
    )
