"""Tables of the recording's rank summaries: spread between ranks, and stragglers at collectives."""

from __future__ import annotations

from typing import Any

from dash import html

from memprof.analysis.ranks.rank_report import RankComparison, Spread, compare_ranks, job_notes
from memprof.analysis.ranks.stragglers import Stragglers, find_stragglers
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_bytes_change, format_percent, format_us
from memprof_dashboard import parts
from memprof_dashboard.palette import fill_of

#: Maximum rows of a table.
MOST_ROWS = 12
#: Ranks in the table of many.
MOST_RANKS = 40


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
