"""Wording shared by all formats of a diff: the headline, and how changes and times are formatted."""

from __future__ import annotations

import math

from memprof.analysis.diff.comparison import Change, Diff, Pair
from memprof.analysis.diff.summary import NOTHING
from memprof.units import format_bytes, format_bytes_change, format_us, format_us_change

#: Longest name that is not shortened.
_LONGEST_NAME = 120

#: Kinds of parts, and the titles of their tables.
TITLES = {
    "category": "by category",
    "module": "by module",
    "op": "by allocating operator",
    "source": "by line of code",
    "storage": "by storage",
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


def short(name: str) -> str:
    """Returns a name, its middle elided if it is long."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def first_line(found: Diff) -> Change | None:
    """Returns the line of code, or else the module, with the largest change in the direction of the total."""
    whole = found.focus.bytes
    for kind in ("source", "module"):
        for one in found.focus.parts[kind]:
            if one.bytes * whole > 0 and one.name != NOTHING:
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


def pair_row(pair: Pair) -> tuple[str, str, str, str, str]:
    """Returns name, base, head, change and percentage of one moment."""
    base = "" if pair.base is None else format_bytes(pair.base.bytes)
    head = "" if pair.head is None else format_bytes(pair.head.bytes)
    return pair.name, base, head, format_bytes_change(pair.bytes), percent(pair.bytes, pair.base_bytes)


def time_rows(found: Diff) -> list[tuple[str, str, str, str, str]]:
    """Returns the rows of step time, recompute time and reserved bytes, where both sides have them."""
    rows = []
    for name, base, head in (
        ("step time", found.base.step_time_us, found.head.step_time_us),
        ("recompute time", found.base.recompute_time_us, found.head.recompute_time_us),
    ):
        if math.isfinite(base) and math.isfinite(head) and (base or head):
            change = round(head - base, 1) + 0.0  # avoid -0.0
            rows.append((name, format_us(base), format_us(head), format_us_change(change), percent(change, base)))
    if found.base.reserved_bytes >= 0 and found.head.reserved_bytes >= 0:
        for name, less in (("reserved", 0), ("reserved, not allocated", 1)):
            before = found.base.reserved_bytes - less * found.base.peak.bytes
            after = found.head.reserved_bytes - less * found.head.peak.bytes
            change = after - before
            rows.append(
                (name, format_bytes(before), format_bytes(after), format_bytes_change(change), percent(change, before))
            )
    return rows


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


def changed(pair: Pair, kind: str, rows: int) -> tuple[list[Change], int]:
    """Returns the largest changes of a kind, and the number of remaining ones."""
    parts = [one for one in pair.parts[kind] if one.bytes]
    return parts[:rows], max(0, len(parts) - rows)


def state(change: Change) -> str:
    """Returns whether a part is new, gone, larger or smaller."""
    if not change.base:
        return "new"
    if not change.head:
        return "gone"
    return "grown" if change.bytes > 0 else "less"
