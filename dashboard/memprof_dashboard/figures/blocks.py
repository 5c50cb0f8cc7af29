"""Storage lifetimes by address: one rectangle each, lighter after its last use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from plotly import graph_objects as go

from memprof.replay.history import Ids
from memprof.trace.schema import NONE, Ints
from memprof_dashboard.figures.shared import LEGEND, escaped, framed, hatched, message, note, unit_of
from memprof_dashboard.figures.timeline_marks import cursor_line
from memprof_dashboard.palette import FILLS, Theme, fill_of

#: Maximum bytes of hover text, given to the largest blocks first; bounds the response for names of any length.
_MOST_TEXT = 50_000
#: Idle tails narrower than this fraction of the range are too narrow to see.
_NARROWEST = 0.002
#: Maximum number of idle tails marked: those of the largest area.
_MOST_IDLE = 1_000


#: Left, right, where it begins, bytes.
Box = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Rectangles:
    """Blocks as drawn; arrays of shape ``(blocks,)``.

    Attributes:
        rows: The storage of each.
        left: The operator it is born at, 0 for those alive before.
        right: The operator behind its last.
        idle: The operator after its last use; equal to ``right`` where it is used to its end or its use is unknown.
        y: Where it begins, in bytes.
        size: Its bytes.
        category: Its category.
        text: Size, module and operator, as the recording names them.
        floor: Above it are addresses, below it blocks are packed.
        top: Where the highest block ends.
    """

    rows: Ints
    left: Ids
    right: Ids
    idle: Ids
    y: Ints
    size: Ints
    category: Sequence[str]
    text: Sequence[str]
    floor: int
    top: int

    def box(self, storage: int) -> Box | None:
        """Returns the box of a storage's block; None where it is not drawn."""
        places = np.flatnonzero(self.rows == storage)
        if not len(places):
            return None
        place = int(places[0])
        return int(self.left[place]), int(self.right[place]), int(self.y[place]), int(self.size[place])


def blocks(drawn: Rectangles, first: int, end: int, at: int, theme: Theme, storage: int = NONE) -> go.Figure:
    """Draws the blocks in a range of operators.

    Args:
        drawn: The blocks, the largest first.
        first: First operator of the range.
        end: End of the range (exclusive).
        at: The operator under the cursor.
        theme: The page's colours.
        storage: Row of the selected storage, NONE for none.

    Returns:
        The figure: bars for each category, then one trace that covers what is held after its last use. x is the
        operator's row as in the timeline, y bytes in the unit that suits their height; ``customdata`` holds the
        storage's row.
    """
    if not len(drawn.rows):
        return message("No storage is live in this range.", theme)
    unit, unit_bytes = unit_of(drawn.top)
    texts = _texts(drawn.text)
    category = np.array(drawn.category, dtype=object)
    present = set(drawn.category)
    figure = go.Figure()
    for name in [*(name for name in FILLS if name in present), *sorted(present - FILLS.keys())]:
        chosen = np.flatnonzero(category == name)
        fill = fill_of(name)
        figure.add_trace(
            go.Bar(
                **_box(drawn.left[chosen], drawn.right[chosen], drawn.y[chosen], drawn.size[chosen], unit_bytes),
                name=escaped(fill.label),
                customdata=drawn.rows[chosen].tolist(),  # as a list: arrays are missing from what a click sends
                text=[texts[place] for place in chosen.tolist()],
                textposition="none",
                marker={
                    "color": fill.colour,
                    "line": {"width": _borders(drawn.size[chosen], drawn.top), "color": theme.ink},
                    "pattern": hatched(fill.pattern),
                },
                hovertemplate=(
                    f"{escaped(fill.label)}, from operator %{{base:,}} until %{{x:,}}<br>%{{text}}<extra></extra>"
                ),
            )
        )
    figure.add_trace(_idle(drawn, first, end, unit_bytes, theme))
    framed(figure, theme)
    figure.update_layout(
        barmode="overlay",
        hovermode="closest",
        dragmode="zoom",
        uirevision="kept",
        legend={**LEGEND, "font": {"size": 10.5}},
        xaxis={"title": {"text": "operator", "standoff": 6}, "range": [first, end], "showgrid": False},
        yaxis={
            "title": {"text": unit},
            "range": [0, 1.02 * drawn.top / unit_bytes],
            "fixedrange": True,
            "showgrid": False,
        },
        shapes=[
            cursor_line(at + 0.5, theme),
            chosen_frame(drawn.box(storage), drawn.top, theme),
            *_floor(drawn, unit_bytes, theme),
        ],
        annotations=_floor_name(drawn, unit_bytes, theme),
    )
    return figure


def chosen_frame(box: Box | None, top: int, theme: Theme) -> dict[str, object]:
    """Returns the shape around the selected block, the figure's second; without width where there is none.

    Args:
        box: Where the block is.
        top: Where the highest block of the figure ends.
        theme: The page's colours.
    """
    left, right, y, size = box or (0, 0, 0, 0)
    unit_bytes = unit_of(top)[1]
    return {
        "type": "rect",
        "x0": left,
        "x1": right,
        "y0": y / unit_bytes,
        "y1": (y + size) / unit_bytes,
        "line": {"color": theme.accent, "width": 3 if box else 0},
    }


def _idle(drawn: Rectangles, first: int, end: int, unit_bytes: int, theme: Theme) -> go.Bar:
    """Returns the overlay that lightens blocks after their last use."""
    width = np.minimum(drawn.right, end) - np.maximum(drawn.idle, first)
    chosen = np.flatnonzero(width > _NARROWEST * (end - first))
    chosen = chosen[np.argsort(-width[chosen] * drawn.size[chosen].astype(np.float64), kind="stable")[:_MOST_IDLE]]
    return go.Bar(
        **_box(drawn.idle[chosen], drawn.right[chosen], drawn.y[chosen], drawn.size[chosen], unit_bytes),
        name=f"{'pale' if theme.name == 'light' else 'dimmed'}: held after last use",
        hoverinfo="skip",
        marker={
            "color": "rgba(255,255,255,0.72)" if theme.name == "light" else "rgba(22,26,30,0.72)",
            "line": {"width": 0.5, "color": theme.faint},
        },
    )


def _box(left: Ids, right: Ids, y: Ints, size: Ints, unit_bytes: int) -> dict[str, Any]:
    return {
        "orientation": "h",
        "base": left.astype(np.int32),
        "x": (right - left).astype(np.int32),
        "y": ((y + size / 2) / unit_bytes).astype(np.float32),
        "width": (size / unit_bytes).astype(np.float32),
    }


def _borders(size: Ints, top: int) -> np.ndarray:
    """Returns the blocks' border widths: 0 for thin blocks, whose colour a border would hide."""
    return np.where(size > top / 100, 1, 0).astype(np.uint8)


def _texts(names: Sequence[str]) -> list[str]:
    """Returns hover texts for the largest blocks up to the size limit, then empty ones."""
    left, texts = _MOST_TEXT, []
    for name in names:
        text = escaped(name, 64)
        left -= len(text.encode()) + 3
        texts.append(text if left > 0 else "")
    return texts


def _floor(drawn: Rectangles, unit_bytes: int, theme: Theme) -> list[dict[str, object]]:
    if not 0 < drawn.floor < drawn.top:
        return []
    y = drawn.floor / unit_bytes
    line = {"color": theme.ink, "width": 1, "dash": "dot"}
    return [{"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y, "line": line}]


def _floor_name(drawn: Rectangles, unit_bytes: int, theme: Theme) -> list[dict[str, object]]:
    if not 0 < drawn.floor < drawn.top:
        return []
    corner = {"xref": "paper", "xanchor": "right", "bgcolor": theme.paper, "opacity": 0.85}
    return [
        note(1, drawn.floor / unit_bytes, text, 10, theme.ink, yanchor=anchor, **corner)
        for anchor, text in (("bottom", "addresses ↑"), ("top", "address unknown ↓"))
    ]
