"""The tables of a job's ranks: their peaks, the spread between them, and who is late at collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from memprof.analysis.ranks.rank_report import RankComparison, RankPeak, Spread, name_numbers
from memprof.analysis.ranks.stragglers import Stragglers
from memprof.analysis.table import (
    BYTES,
    BYTES_CHANGE,
    COUNT,
    FIGURE,
    NAME,
    NUMBER,
    NUMBERS,
    TEXT,
    US,
    Cell,
    Column,
    FactTable,
    record,
    records,
    shown,
)
from memprof.json_values import Json, to_json
from memprof.units import format_count, format_percent

OUTSIDE = "(outside any module)"
#: Version of the keys.
RANKS_SCHEMA = 1


def rank_columns(compared: RankComparison | None = None, reported: int | None = None) -> tuple[Column, ...]:
    """Returns the columns of RankPeaks."""

    def to_median(one: RankPeak) -> int | None:
        whole = None if compared is None else compared.peak
        return None if whole is None or one.peak_bytes is None else one.peak_bytes - whole.median

    def remarks(one: RankPeak) -> str:
        is_worst = compared is not None and one.rank == compared.worst
        found = (("highest", is_worst), ("shown below", one.rank == reported), ("ends early", bool(one.ends_at)))
        return ", ".join(remark for remark, is_so in found if is_so)

    return (
        Column("rank", "rank", NUMBER),
        Column("same_ranks", None, NUMBERS),
        shown("also for", TEXT, lambda one: (one.same_ranks and name_numbers(one.same_ranks)) or "", is_optional=True),
        Column("node", "node", TEXT, lambda one: one.node or None, is_optional=True),
        Column("device", "device"),
        Column("step", None, NUMBER),
        Column("peak_allocated_bytes", "peak", BYTES, attrgetter("peak_bytes"), missing="none"),
        shown("to the median", BYTES_CHANGE, to_median),
        Column("peak_reserved_bytes", None, BYTES, attrgetter("reserved_bytes")),
        Column("peak_op_id", None, NUMBER, attrgetter("op_id")),
        Column("peak_phase", "phase", TEXT, lambda one: one.phase or None),
        Column("peak_op", None, TEXT, lambda one: one.op or None),
        Column("peak_module", "module", NAME, lambda one: one.module or None, is_optional=True),
        Column("step_time_us", "step time", US),
        Column("ends_early", None, TEXT, lambda one: one.ends_at or None),
        shown("", TEXT, remarks, key="remarks"),
    )


RANKS = rank_columns()


def peaks(compared: RankComparison, rows: int, reported: int | None = None) -> FactTable:
    """Returns the peak of each rank; with many ranks, the highest and the lowest.

    Args:
        compared: The ranks.
        rows: Maximum rows.
        reported: The rank shown on the rest of the page.
    """
    has_nodes = len({one.node for one in compared.ranks}) > 1
    columns = tuple(one for one in rank_columns(compared, reported) if one.key != "node" or has_nodes)
    if len(compared.ranks) <= rows:
        return FactTable(columns, compared.ranks)
    # Those without a peak come last.
    ordered = sorted(compared.ranks, key=lambda one: (one.peak_bytes is None, -(one.peak_bytes or 0), one.rank))
    table = FactTable(columns, [*ordered[: rows - 1], ordered[-1]])
    table.add("rest", rank=Cell("..."), remarks=Cell(f"{len(ordered) - rows:,} ranks between"))
    table.rows[-2:] = reversed(table.rows[-2:])
    return table


def spread_columns(head: str = "part") -> tuple[Column, ...]:
    """Returns the columns of Spreads over parts of a kind."""

    def name(one: Spread) -> str | Cell:
        return Cell(one.name, category=one.name) if head == "category" else one.name

    def imbalance(one: Spread) -> str:
        return "" if math.isinf(one.imbalance) else f"+{format_percent(one.imbalance)}"

    return (
        Column("name", None, TEXT, lambda one: one.name or None),
        shown(head, NAME, name, missing=OUTSIDE, key="part"),
        Column("least_bytes", "min", BYTES, attrgetter("least")),
        Column("median_bytes", "median", BYTES, attrgetter("median")),
        Column("most_bytes", "max", BYTES, attrgetter("most")),
        shown("spread", BYTES, attrgetter("bytes")),
        shown("max to median", FIGURE, imbalance),
        Column("least_rank", None, NUMBER),
        Column("most_rank", None, NUMBER),
        shown("on rank", TEXT, lambda one: f"{one.most_rank}, least {one.least_rank}"),
    )


SPREADS = spread_columns()


def spreads(found: Sequence[Spread], head: str, rows: int) -> FactTable:
    """Returns the spread between ranks by phase, category or module; parts without any spread are left out."""
    apart = [one for one in found if one.bytes]
    table = FactTable(spread_columns(head), apart[:rows])
    if len(apart) > rows:
        table.add("rest", part=Cell(f"{len(apart) - rows:,} more with less spread"))
    return table


STRAGGLERS = (
    Column("rank", "rank", NUMBER),
    Column("collectives", "collectives", COUNT),
    Column("times_last", None, COUNT),
    shown("times last", FIGURE, lambda one: f"{one.times_last:,} ({format_percent(one.times_last / one.collectives)})"),
    Column("kept_waiting_us", "behind the median", US),
    Column("waited_us", "own wait", US),
)


def stragglers(found: Stragglers, rows: int) -> FactTable:
    """Returns which ranks arrive last at the job's collectives."""
    late = [one for one in found.ranks if one.times_last]
    table = FactTable(STRAGGLERS, late[:rows])
    if len(late) > rows:
        table.add("rest", rank=Cell("..."), **{"times last": Cell(f"{format_count(len(late) - rows, 'more rank')}")})
    return table


COLLECTIVES = (
    Column("name", None),
    shown("collective", TEXT, lambda one: one.name.removesuffix(".default")),
    Column("step", "step", NUMBER),
    Column("place", "place", NUMBER),
    Column("phase", "phase"),
    Column("bytes", "bytes", BYTES),
    Column("last_rank", "last rank", NUMBER),
    Column("behind_us", "behind the median", US),
    Column("spread_us", "spread", US),
)


def late_collectives(found: Stragglers, rows: int) -> FactTable:
    """Returns the collectives at which one rank arrived much later than the others."""
    return FactTable(COLLECTIVES, found.collectives[:rows])


def ranks_to_json(compared: RankComparison, found: Stragglers, notes: tuple[str, ...]) -> Json:
    """Returns the output of `memprof report --by rank`: bytes, microseconds, stable keys."""
    return {
        "schema": RANKS_SCHEMA,
        "worst_rank": compared.worst,
        "ranks": records(RANKS, compared.ranks),
        **spreads_to_json(compared),
        "stragglers": records(STRAGGLERS, found.ranks),
        "late_collectives": records(COLLECTIVES, found.collectives),
        "clocks": {
            "count": found.alignment.clocks,
            "offset_us": to_json(found.alignment.offset_us),
            "error_us": to_json(found.alignment.error_us),
        },
        "notes": list(notes),
    }


def spreads_to_json(compared: RankComparison) -> Json:
    """Returns the spread over the ranks."""
    return {
        "peak_spread": None if compared.peak is None else record(SPREADS, compared.peak),
        "spread_by_phase": records(SPREADS, compared.phases),
        "spread_by_category": records(SPREADS, compared.categories),
        "spread_by_module": records(SPREADS, compared.modules),
    }
