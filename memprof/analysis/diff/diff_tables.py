"""The tables and sentences of a diff: the peaks, and what changed in one of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from memprof.analysis.diff.comparison import Change, Diff, Pair, fold_layers
from memprof.analysis.diff.summary import KINDS, NOTHING, OTHERS
from memprof.analysis.table import BYTES, BYTES_CHANGE, FIGURE, NAME, TEXT, Cell, Column, FactTable, shown
from memprof.units import elided, format_bytes, format_bytes_change, format_count, format_us, format_us_change

#: Longest name that is not shortened.
_LONGEST_NAME = 120

#: Kinds of parts, and the titles of their tables.
TITLES = {
    "category": "by category",
    "module": "by module",
    "op": "by allocating operator",
    "source": "by line of code",
    "storage": "by storage",
    "file": "by file",
    "folder": "by folder",
}


def headline(found: Diff) -> str:
    """Returns the change of the peak and its largest part in one sentence."""
    pair = found.peak
    if found.is_unchanged:
        return f"Nothing changed: the peak is {format_bytes(pair.head_bytes)}, and every phase holds the same."
    if not pair.bytes:
        return f"The peak is the same, {format_bytes(pair.head_bytes)}; its composition, or another phase, differs."
    words = f"The peak {'grew' if pair.bytes > 0 else 'shrank'} by {format_bytes(abs(pair.bytes))}"
    share = percent(pair.bytes, pair.base_bytes)
    words += f" ({share})" if share else ""
    words += f" to {format_bytes(pair.head_bytes)}"
    first = first_line(found)
    return (
        f"{words}, {format_bytes_change(first.bytes)} from {short(first.name)}." if first is not None else f"{words}."
    )


def titles_of(found: Diff) -> dict[str, str]:
    """Returns the kinds of parts that a diff shows, with the titles of their tables."""
    return {kind: TITLES[kind] for kind in ((found.by,) if found.by else KINDS)}


def short(name: str) -> str:
    """Returns a name, its middle elided if it is long."""
    return elided(name, _LONGEST_NAME)


def first_line(found: Diff) -> Change | None:
    """Returns the line of code, or else the module, with the largest change in the direction of the total."""
    whole = found.focus.bytes
    for kind in ("source", "module"):
        for one in found.focus.parts[kind]:
            if one.bytes * whole > 0 and one.name not in (NOTHING, OTHERS):
                return one
    return None


def moved(found: Diff) -> str:
    """Returns where the peak is now, and where it was if it moved."""
    base, head = found.base.peak, found.head.peak
    if found.has_moved:
        return f"The peak moved from {base.place} ({base.op}) to {head.place} ({head.op})."
    return f"The peak is in {head.place} ({head.op})."


def percent(change: float, base: float) -> str:
    """Formats a change as a percentage of its base; "" if the base is zero."""
    return f"{100 * change / base:+.1f} %" if base and math.isfinite(change / base) else ""


def rank_words(found: Diff) -> str:
    """Returns the worst rank and the spread between ranks; "" for a single-rank job."""
    if max(len(found.base.rank_peaks), len(found.head.rank_peaks)) < 2:
        return ""
    parts = []
    for side, summary in (("base", found.base), ("now", found.head)):
        peaks = summary.rank_peaks
        worst = max(peaks, key=lambda rank: peaks[rank])
        spread = max(peaks.values()) - min(peaks.values())
        parts.append(f"{side} rank {worst} with {format_bytes(peaks[worst])}, {format_bytes(spread)} above the lowest")
    return f"Worst rank: {'; '.join(parts)}."


#: What a part without a name is, by kind.
_NAMELESS = {"module": "(outside any module)", "op": "(allocated before the step)"}
_NO_STACK = "(allocated before the step, or no stack)"


def _place(side: str) -> Callable[[Pair], str]:
    return lambda pair: "" if (spot := getattr(pair, side)) is None else f"{spot.module} {spot.line}".strip()


def _ratio(one: Pair) -> str:
    return percent(one.bytes, one.base_bytes)


MOMENTS = (
    shown("moment", TEXT, attrgetter("name")),
    shown("base", BYTES, lambda pair: None if pair.base is None else pair.base_bytes, missing="not run"),
    shown("head", BYTES, lambda pair: None if pair.head is None else pair.head_bytes, missing="not run"),
    shown("change", BYTES_CHANGE, attrgetter("bytes")),
    shown("", FIGURE, _ratio, key="percent"),
)
PLACES = (shown("in the base", TEXT, _place("base")), shown("now", TEXT, _place("head")))


def moments(found: Diff, *, has_places: bool = True) -> FactTable:
    """Returns the peaks of the step and of each phase, its times and its reserved memory where both sides have them."""
    table = FactTable((*MOMENTS, *PLACES) if has_places else MOMENTS, [found.peak, *found.phases])
    base, head = found.base, found.head
    for name, before, after in (
        ("step time", base.step_time_us, head.step_time_us),
        ("recompute time", base.recompute_time_us, head.recompute_time_us),
    ):
        if math.isfinite(before) and math.isfinite(after) and (before or after):
            change = round(after - before, 1) + 0.0  # avoid -0.0
            cells = [Cell(format_us(before)), Cell(format_us(after)), Cell(format_us_change(change))]
            figures = dict(zip(("base", "head", "change"), cells, strict=True))
            table.add("", moment=name, percent=percent(change, before), **figures)
    if base.reserved_bytes >= 0 and head.reserved_bytes >= 0:
        for name, less in (("reserved", 0), ("reserved, not allocated", 1)):
            before, after = base.reserved_bytes - less * base.peak.bytes, head.reserved_bytes - less * head.peak.bytes
            change = after - before
            table.add("", moment=name, base=before, head=after, change=change, percent=percent(change, before))
    if math.isfinite(base.host_bytes) and math.isfinite(head.host_bytes):
        before, after = int(base.host_bytes), int(head.host_bytes)
        change = after - before
        table.add("", moment="host memory", base=before, head=after, change=change, percent=percent(change, before))
    return table


def _state(change: Change) -> str:
    """Returns whether a part is new, gone, larger or smaller."""
    if not change.bytes:
        return ""
    if not change.base:
        return "new"
    if not change.head:
        return "gone"
    return "grown" if change.bytes > 0 else "less"


def part_name(kind: str, one: Change) -> Cell:
    """Returns the name of a part of a kind."""
    if kind == "category":
        return Cell(one.name, category=one.name)
    return Cell(_NAMELESS.get(kind, _NO_STACK) if one.name == NOTHING else one.name)


def change_columns(kind: str = "") -> tuple[Column, ...]:
    """Returns the columns of Changes of a kind."""
    return (
        Column("name", None),
        shown(TITLES.get(kind, "").removeprefix("by "), NAME, lambda one: part_name(kind, one), key="part"),
        Column("base_bytes", "base", BYTES, attrgetter("base")),
        Column("head_bytes", "head", BYTES, attrgetter("head")),
        Column("change_bytes", "change", BYTES_CHANGE, attrgetter("bytes")),
        shown("", FIGURE, lambda one: percent(one.bytes, one.base), key="percent"),
        shown("", TEXT, _state, key="state"),
    )


CHANGES = change_columns()


def changed(pair: Pair, kind: str, rows: int) -> tuple[FactTable, int]:
    """Returns the largest changes of a kind, repeated layers in one row, and the number of remaining ones.

    Nothing is returned where no part has a name: with a summary, which lists the largest parts only.
    """
    found = [one for one in pair.parts[kind] if one.bytes]
    found = list(fold_layers(found)) if kind in ("module", "storage") else found  # their names have layers' numbers
    found = [] if all(one.name == OTHERS for one in found) else found
    return FactTable(change_columns(kind), found[:rows]), max(0, len(found) - rows)


def all_parts(pair: Pair, kind: str, rows: int) -> FactTable:
    """Returns the parts of a kind, those that changed most first; the last row sums all of them."""
    kept, rest = pair.parts[kind][:rows], pair.parts[kind][rows:]
    table = FactTable(change_columns(kind), kept)
    sums: list[tuple[str, str, Any]] = [("total", "all", pair.parts[kind])]
    if rest:
        sums.insert(0, ("rest", f"other ({format_count(len(rest), 'row')})", rest))
    for row, name, held in sums:
        before, after = sum(one.base for one in held), sum(one.head for one in held)
        change = after - before
        cells = {"base_bytes": before, "head_bytes": after, "change_bytes": change, "percent": percent(change, before)}
        table.add(row, part=Cell(name), **cells)
    return table
