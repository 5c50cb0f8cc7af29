"""Wording shared by all formats of a diff: the headline, and how changes and times are formatted."""

from __future__ import annotations

import math

from memprof.analysis.diff.comparison import Change, Diff
from memprof.analysis.diff.summary import KINDS, NOTHING, OTHERS
from memprof.units import elided, format_bytes, format_bytes_change

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
