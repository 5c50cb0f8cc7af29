"""Flame graph and treemap: nested boxes whose widths or areas are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from plotly import graph_objects as go

from memprof.trace.schema import NONE
from memprof.units import format_bytes, format_bytes_change
from memprof_dashboard.figures.bars import GREW, SHRANK
from memprof_dashboard.figures.shared import escaped, framed, message
from memprof_dashboard.palette import Theme, fill_of, ink_on
from memprof_dashboard.views.boxes import Box, simplified

if TYPE_CHECKING:
    from memprof_dashboard.views.changes import ChangedBox

#: How many levels of a flame graph are drawn at once; a click shows those further inside.
_DEPTH = 9
#: A box whose net change is less than this share of what changed in it grew and shrank about as much.
_MIXED = 0.2
#: Colour, hatching and words of the direction of a change.
_DIRECTIONS = {1: (GREW, "", "mostly grew"), -1: (SHRANK, "/", "mostly shrank"), 0: ("#999999", "x", "grew and shrank")}


def treemap(boxes: Sequence[Box], theme: Theme, find: str = "") -> go.Figure:
    """Draws a treemap.

    Args:
        boxes: The boxes, the outermost first; each is as large as those inside it together.
        theme: The page's colours.
        find: What is searched for; the boxes whose names contain it are framed.

    Returns:
        The figure: one treemap, coloured by category; a box around a single one of its size is drawn as one.
    """
    return _live(simplified(boxes, lambda name: fill_of(name).label), theme, find, is_flame=False)


def flame(boxes: Sequence[Box], theme: Theme, find: str = "") -> go.Figure:
    """Draws a flame graph, the outermost box on top; arguments as for ``treemap``."""
    return _live(boxes, theme, find, is_flame=True)


def is_found(box: Box, find: str) -> bool:
    """Whether a box's name, or what its storages are searched by, contains the text that is searched for."""
    wanted = find.strip().lower()
    return bool(wanted) and (wanted in box.label.lower() or wanted in box.find.lower())


def changed(boxes: Sequence[ChangedBox], theme: Theme, *, is_flame: bool) -> go.Figure:
    """Draws what changed between two recordings.

    Args:
        boxes: The boxes, the outermost first.
        theme: The page's colours.
        is_flame: As a flame graph; otherwise as a treemap.

    Returns:
        The figure; a box is as large as what changed in it, its colour and its text say in which direction.
    """
    if not boxes or not boxes[0].size:
        return message("No change.", theme)
    directions = [_DIRECTIONS[_direction(box)] for box in boxes]
    looks = _Looks(
        colours=[
            theme.faint if box.parent == NONE else colour for box, (colour, _, _) in zip(boxes, directions, strict=True)
        ],
        patterns=[pattern for _, pattern, _ in directions],
        texts=[format_bytes_change(box.head - box.base) for box in boxes],
        details=[
            f"{format_bytes(box.base)} in the base, {format_bytes(box.head)} in the other<br>{words}"
            for box, (_, _, words) in zip(boxes, directions, strict=True)
        ],
        marked=[False] * len(boxes),
        hatching=0.25,
    )
    return _drawn(boxes, looks, theme, is_flame=is_flame)


def _direction(box: ChangedBox) -> int:
    """Returns 1 for a box of which most grew, -1 where most shrank, 0 where both are about as much."""
    net = box.head - box.base
    return 0 if abs(net) < _MIXED * box.size else 1 if net > 0 else -1


@dataclass(frozen=True)
class _Looks:
    """How each box is drawn: colour, pattern, text, hover, and whether it is framed; and how strong patterns are."""

    colours: list[str]
    patterns: list[str]
    texts: list[str]
    details: list[str]
    marked: list[bool]
    hatching: float = 0.5


def _live(boxes: Sequence[Box], theme: Theme, find: str, *, is_flame: bool) -> go.Figure:
    if not boxes or not boxes[0].size:
        return message("No storage is live at the cursor.", theme)
    fills = [fill_of(box.category) for box in boxes]
    total = boxes[0].size
    looks = _Looks(
        colours=[theme.faint if box.parent == NONE else fill.colour for box, fill in zip(boxes, fills, strict=True)],
        patterns=[fill.pattern for fill in fills],
        texts=[format_bytes(box.size) for box in boxes],
        details=[
            f"{box.size:,} B, {box.size / total:.1%} of the total<br>mostly {escaped(fill.label)}"
            for box, fill in zip(boxes, fills, strict=True)
        ],
        marked=[is_found(box, find) for box in boxes],
    )
    return _drawn(boxes, looks, theme, is_flame=is_flame)


def _drawn(boxes: Sequence[Box | ChangedBox], looks: _Looks, theme: Theme, *, is_flame: bool) -> go.Figure:
    around = {box.parent for box in boxes}
    # The head of a box of a treemap that holds others is its label only.
    has_size = [place in around and not is_flame for place in range(len(boxes))]
    common: dict[str, Any] = {
        "ids": [str(place) for place in range(len(boxes))],
        "labels": [
            f"{escaped(box.label, 60)}, {text}" if sized else escaped(box.label, 60)
            for box, text, sized in zip(boxes, looks.texts, has_size, strict=True)
        ],
        "parents": ["" if box.parent == NONE else str(box.parent) for box in boxes],
        "values": np.array([box.size for box in boxes], dtype=np.float64),
        "text": looks.texts,
        "textfont": {"color": [ink_on(colour) for colour in looks.colours]},
        "customdata": looks.details,
        "branchvalues": "total",
        "texttemplate": "%{label}  %{text}" if is_flame else "%{label}<br>%{text}",
        "hovertemplate": "%{label}<br>%{customdata}<extra></extra>",
        "pathbar": {"visible": True, "side": "top", "thickness": 22, "edgeshape": ">"},
        "sort": True,
    }
    marker: dict[str, Any] = {
        "colors": looks.colours,
        "pattern": {
            "shape": looks.patterns,
            "fillmode": "replace",  # over the colours of many boxes plotly finds no contrast, and warns
            "bgcolor": looks.colours,
            "fgcolor": "#222222",
            "fgopacity": looks.hatching,
            "size": 6,
        },
        "line": {
            "width": [3 if is_marked else 1 for is_marked in looks.marked],
            "color": [theme.ink if is_marked else theme.paper for is_marked in looks.marked],
        },
    }
    if is_flame:
        tiling = {"orientation": "v", "pad": 1}
        trace: Any = go.Icicle(**common, marker=marker, tiling=tiling, maxdepth=_DEPTH, leaf={"opacity": 1})
    else:
        trace = go.Treemap(**common, marker={**marker, "pad": {"t": 20, "l": 3, "r": 3, "b": 3}}, tiling={"pad": 1})
    figure = framed(go.Figure(trace), theme)
    figure.update_layout(margin={"l": 0, "r": 0, "t": 24, "b": 0}, uniformtext={"minsize": 10, "mode": "hide"})
    return figure
