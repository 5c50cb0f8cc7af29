"""The view: recording, range and moment, encoded in the URL, and how clicks, keys and drags change it."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np

from memprof.trace.schema import Floats
from memprof_dashboard.sources import Rank

#: Longest text accepted from a URL; a plan names modules.
_LONGEST, _LONGEST_PLAN = 200, 2_000
_LARGEST = 2**53
_NUMBER = re.compile(r"-?[0-9]{1,20}")
#: Minimum number of operators shown.
_NARROWEST = 4


@dataclass(frozen=True)
class View:
    """The current view. Positions are rows of the recording's operators.

    Attributes:
        trace: Place of the recording among those opened.
        rank: Its rank; -1 for the one with the highest peak.
        tab: Name of the page below the timeline, as in ``pages.PAGES``; for an unknown name, the default page is shown.
        first: First operator shown; -1 for the recording's own choice.
        end: End of the visible range (exclusive).
        at: The operator under the cursor; -1 for the peak.
        other: Place of a second recording to compare with; -1 for none.
        storage: Row of the selected storage; -1 for none.
        find: Search text: part of a module's, operator's or file's name.
        budget: Budget line, as it was typed.
        side: How live memory at the cursor is shown, as in ``side.panel.SHOWN``; for an unknown name, the table.
        by: What it is grouped by, as in ``side.panel.GROUPED``.
        axis: What the timeline's x axis is: ``ops``, or ``time`` where the recording has times.
        inverted: 1 for a flame graph of stacks with the innermost frame outside.
        lay: Where the timeline of the second recording is, as in ``views.timelines``; for an unknown value, below.
        plan: The plan drawn over the timeline, as ``whatif.draft.Offer`` writes it; "" for none.
    """

    trace: int = 0
    rank: int = -1
    tab: str = "whatif"
    first: int = -1
    end: int = -1
    at: int = -1
    other: int = -1
    storage: int = -1
    find: str = ""
    budget: str = ""
    side: str = "table"
    by: str = "module"
    lay: str = "below"
    axis: str = "ops"
    inverted: int = 0
    plan: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, ready for a store in the browser."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: Any) -> View:
        """Parses fields sent by the browser; invalid ones take their default."""
        if not isinstance(fields, dict):
            return View()
        return View(**{name: value for name, value in fields.items() if _is_sound(name, value)})

    def to_search(self) -> str:
        """Returns the URL's query string; default values are omitted."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return f"?{urlencode(fields)}" if fields else ""

    @staticmethod
    def from_search(search: Any) -> View:
        """Parses a URL's query string; invalid fields take their default."""
        text = search if isinstance(search, str) else ""
        texts = dict(parse_qsl(text.removeprefix("?")[: 20 * _LONGEST + 3 * _LONGEST_PLAN], keep_blank_values=True))
        defaults = {field.name: field.default for field in dataclasses.fields(View)}
        fields: dict[str, Any] = {}
        for name, text in texts.items():
            if isinstance(defaults.get(name), int):
                fields[name] = int(text) if _NUMBER.fullmatch(text) else None
            else:
                fields[name] = text
        return View.from_json(fields)

    def change(self, /, **fields: Any) -> View:
        """Returns the view with some fields changed; invalid values are ignored."""
        return dataclasses.replace(self, **{name: value for name, value in fields.items() if _is_sound(name, value)})


def _is_sound(name: str, value: Any) -> bool:
    default = next((field.default for field in dataclasses.fields(View) if field.name == name), None)
    if isinstance(default, int):
        return type(value) is int and -1 <= value < _LARGEST
    longest = _LONGEST_PLAN if name == "plan" else _LONGEST
    return isinstance(value, str) and default is not None and len(value) <= longest


def clock_of(view: View, rank: Rank) -> Floats | None:
    """Returns ``Rank.clock`` where the view's x axis is time, else None."""
    return rank.clock if view.axis == "time" and rank.history.ops and not rank.is_end_state else None


@dataclass(frozen=True)
class Shown:
    """A view's resolved range and cursor: the recording's defaults where the view sets none.

    Attributes:
        first: First operator shown.
        end: End of the visible range (exclusive).
        at: The operator under the cursor.
    """

    first: int
    end: int
    at: int


def shown(view: View, rank: Rank) -> Shown:
    """Returns the range and cursor of a view: by default the highest step, with the cursor at its peak."""
    history = rank.history
    if not history.ops:
        return Shown(0, 0, 0)
    if rank.is_end_state:
        return Shown(0, history.ops, history.ops - 1)  # its rows are in no order of time
    first, end = view.first, min(view.end, history.ops)
    if not 0 <= first < end:
        first, end = rank.step_range(rank.fullest_number())
    at = view.at if 0 <= view.at < history.ops else history.peak(first, end)
    return Shown(first, end, at)


def on_zoom(view: View, rank: Rank, relayout: dict[str, Any], clock: Floats | None = None) -> View:
    """Shows the stretch that was dragged over, of operators or of a clock; a double click shows everything."""
    count, edges = rank.history.ops, dragged(relayout)
    if relayout.get("xaxis.autorange"):
        return view.change(first=0, end=count)
    if edges is None:
        return view
    low, high = min(edges), max(edges)
    if clock is not None:
        low, high = float(np.searchsorted(clock, low, side="right") - 1), float(np.searchsorted(clock, high))
    first, end = max(math.floor(low), 0), min(math.ceil(high), count)
    missing = min(_NARROWEST, count) - (end - first)
    if missing > 0:
        first = max(0, min(first - missing // 2, count - _NARROWEST))
        end = min(count, first + _NARROWEST)
    return view.change(first=first, end=end)


def dragged(relayout: Any) -> tuple[float, float] | None:
    """Returns the edges of the stretch that was dragged over, as the browser sends them; None where it names none."""
    if not isinstance(relayout, dict):
        return None
    edges = relayout.get("xaxis.range") or [relayout.get("xaxis.range[0]"), relayout.get("xaxis.range[1]")]
    try:
        low, high = (float(edge) for edge in edges)
    except (TypeError, ValueError, OverflowError):
        return None
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def on_click(view: View, rank: Rank, click: dict[str, Any]) -> View:
    """Puts the cursor on the operator that was clicked; of a column that holds several, on its fullest."""
    clock = clock_of(view, rank)
    try:
        x = float(click["points"][0]["x"])
        x = int(x if clock is None else np.searchsorted(clock, x, side="right") - 1)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError):
        return view
    history, now = rank.history, shown(view, rank)
    if not history.ops:
        return view
    from memprof_dashboard.figures.shared import draw

    drawn = draw(history.total, now.first, now.end, clock=clock)
    place = int(np.searchsorted(drawn.left, min(max(x, now.first), now.end - 1), side="right")) - 1
    return view.change(at=int(drawn.op_ids[place]), storage=-1)


def on_key(view: View, rank: Rank, key: str, *, is_shifted: bool) -> View:
    """Moves by key: arrows by operator, shift by step, P to the peak; the browser zooms."""
    history, now = rank.history, shown(view, rank)
    if not history.ops:
        return view
    if key in ("ArrowLeft", "ArrowRight"):
        forward = key == "ArrowRight"
        at = _next_step(rank, now.at, forward=forward) if is_shifted else now.at + (1 if forward else -1)
        return _followed(view.change(at=min(max(at, 0), history.ops - 1), storage=-1), rank)
    if key in ("p", "P"):
        return view.change(at=history.peak(now.first, now.end), storage=-1)
    if key == "Escape":
        return view.change(storage=-1, find="")
    return view


def _followed(view: View, rank: Rank) -> View:
    """Moves the stretch along when the cursor leaves it."""
    now = shown(view, rank)
    if now.first <= now.at < now.end:
        return view
    width = now.end - now.first
    first = min(max(now.at - width // 2, 0), max(rank.history.ops - width, 0))
    return view.change(first=first, end=first + width)


def _next_step(rank: Rank, at: int, *, forward: bool) -> int:
    """Returns the same place in the next step or the one before: as many operators from its beginning."""
    steps = rank.history.step
    starts = np.concatenate(([0], np.flatnonzero(np.diff(steps)) + 1))
    row = int(np.searchsorted(starts, at, side="right")) - 1
    target = row + (1 if forward else -1)
    if not 0 <= target < len(starts):
        return at
    end = int(starts[target + 1]) if target + 1 < len(starts) else len(steps)
    return min(int(starts[target]) + at - int(starts[row]), end - 1)
