"""The tables that compare the ranks of a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from memprof.analysis.ranks.rank_report import name_numbers
from memprof.cli.page import TailCell, cell, make_table
from memprof.units import format_bytes, format_bytes_change, format_percent, format_us

if TYPE_CHECKING:
    from memprof.analysis.ranks.rank_report import RankComparison, RankPeak, Spread
    from memprof.analysis.ranks.stragglers import Stragglers

_OUTSIDE = "(outside any module)"


def peaks(compared: RankComparison, rows: int, shown: int | None = None) -> Table:
    """Draws the peak of each rank; with many ranks, the highest and lowest.

    Args:
        compared: The ranks.
        rows: Maximum rows.
        shown: The rank shown on the rest of the page.
    """
    ordered = sorted(
        compared.ranks, key=lambda one: (-(one.peak_bytes if one.peak_bytes is not None else -1), one.rank)
    )
    is_cut = len(ordered) > rows
    chosen = [*ordered[: rows - 1], ordered[-1]] if is_cut else list(compared.ranks)
    has_nodes = len({one.node for one in compared.ranks}) > 1
    has_modules = any(one.module for one in chosen)
    has_same = any(one.same_ranks for one in chosen)
    heads = [
        ">rank",
        *(["also for"] if has_same else []),
        *(["node"] if has_nodes else []),
        "device",
        ">peak",
        ">to the median",
        "phase",
    ]
    table = make_table(*heads, *(["module"] if has_modules else []), ">step time", "")
    for place, one in enumerate(chosen):
        if is_cut and place == len(chosen) - 1:
            blanks = [""] * (len(table.columns) - 2)
            table.add_row("...", *blanks, cell(f"{len(ordered) - len(chosen):,} ranks between", "dim"))
        table.add_row(
            str(one.rank),
            *([cell(name_numbers(one.same_ranks) if one.same_ranks else "", "dim")] if has_same else []),
            *([cell(one.node)] if has_nodes else []),
            cell(one.device),
            "none" if one.peak_bytes is None else format_bytes(one.peak_bytes),
            _to_median(one, compared.peak),
            cell(one.phase),
            *([TailCell(one.module)] if has_modules else []),
            format_us(one.step_time_us),
            cell(", ".join(_remarks(one, compared, shown))),
        )
    return table


def spreads(parts: Sequence[Spread], head: str, rows: int) -> Table:
    """Draws the spread between ranks by phase, category or module; parts without any spread are left out.

    Args:
        parts: The parts, in drawing order.
        head: Column header of the parts.
        rows: Maximum rows.
    """
    table = make_table(head, ">min", ">median", ">max", ">spread", ">max to median", "on rank")
    apart = [one for one in parts if one.bytes]
    for one in apart[:rows]:
        table.add_row(
            TailCell(one.name) if one.name else cell(_OUTSIDE, "dim"),
            format_bytes(one.least),
            format_bytes(one.median),
            format_bytes(one.most),
            format_bytes(one.bytes),
            "" if math.isinf(one.imbalance) else f"+{format_percent(one.imbalance)}",
            f"{one.most_rank}, least {one.least_rank}",
        )
    if len(apart) > rows:
        cut = len(apart) - rows
        table.add_row(cell(f"{cut:,} more with less spread", "dim"))
    return table


def stragglers(found: Stragglers, rows: int) -> Table:
    """Draws which ranks arrive last at the job's collectives."""
    table = make_table(">rank", ">collectives", ">times last", ">behind the median", ">own wait")
    late = [one for one in found.ranks if one.times_last]
    for one in late[:rows]:
        table.add_row(
            str(one.rank),
            f"{one.collectives:,}",
            f"{one.times_last:,} ({format_percent(one.times_last / one.collectives)})",
            format_us(one.kept_waiting_us),
            format_us(one.waited_us),
        )
    if len(late) > rows:
        table.add_row("...", "", f"{len(late) - rows:,} more ranks")
    return table


def late_collectives(found: Stragglers, rows: int) -> Table:
    """Draws the collectives at which one rank arrived much later than the others."""
    table = make_table(
        "collective", ">step", ">place", "phase", ">bytes", ">last rank", ">behind the median", ">spread"
    )
    for one in found.collectives[:rows]:
        table.add_row(
            cell(one.name.removesuffix(".default")),
            str(one.step),
            str(one.place),
            cell(one.phase),
            format_bytes(one.bytes),
            str(one.last_rank),
            format_us(one.behind_us),
            format_us(one.spread_us),
        )
    return table


def _to_median(one: RankPeak, whole: Spread | None) -> str:
    return "" if whole is None or one.peak_bytes is None else format_bytes_change(one.peak_bytes - whole.median)


def _remarks(one: RankPeak, compared: RankComparison, shown: int | None) -> list[str]:
    remarks = ["highest"] if one.rank == compared.worst else []
    if one.rank == shown:
        remarks.append("shown below")
    if one.ends_at:
        remarks.append("ends early")
    return remarks
