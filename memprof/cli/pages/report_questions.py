"""The pages of `memprof report` for one question: --by rank, and --leaks."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from memprof.analysis.allocator.allocator_report import fullest_rank
from memprof.analysis.leaks.growth import Series, compare_series, describe_growth
from memprof.analysis.leaks.leak import Leak, describe_holder, describe_leak, describe_rate
from memprof.analysis.leaks.leaks import LeakReport, find_leaks
from memprof.analysis.ranks.rank_report import RankComparison, name_numbers
from memprof.analysis.ranks.stragglers import Stragglers
from memprof.cli.page import Page, TailCell, cell, make_table, printable
from memprof.json_values import to_json
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_bytes_change, format_percent, format_us

if TYPE_CHECKING:
    from memprof.analysis.ranks.rank_report import RankPeak, Spread

_ROWS = 12
_OUTSIDE = "(outside any module)"
_LEAK_ROWS = 10
#: Version of the JSON's keys.
LEAKS_SCHEMA = 1


def fill_rank_page(
    page: Page, compared: RankComparison, found: Stragglers, notes: tuple[str, ...], trace: str, top: int | None
) -> None:
    """Adds the comparison of ranks to a page.

    Args:
        page: The page.
        compared: The ranks.
        found: The stragglers.
        notes: What of the job is missing.
        trace: The trace's path as the user gave it.
        top: Maximum rows per table; None for the default.
    """
    rows = top or _ROWS
    page.add(Text(describe_ranks(compared), style="bold"))
    for note in notes:
        page.add(Text(f"warning: {printable(note)}", style="yellow"))
    page.add_section("Ranks", peaks(compared, max(rows, 2)), "each at the peak of its own highest step")
    page.add_section("Spread by phase", spreads(compared.phases, "phase", rows), "peaks")
    page.add_section("Spread by category", spreads(compared.categories, "category", rows), "at the peaks")
    page.add_section("Spread by module", spreads(compared.modules, "module", rows), "owner or allocator")
    page.add_section("Stragglers at collectives", stragglers(found, rows), found.describe_clocks() or "recorded steps")
    page.add_section("Longest waits at collectives", late_collectives(found, min(rows, 6)))
    page.add("")
    if compared.worst is not None:
        command = f"memprof report {shlex.quote(trace)} --rank {compared.worst}"
        page.add(Text.assemble(("next: ", "dim"), command, ("  what fills the worst rank", "dim")))


def describe_ranks(compared: RankComparison) -> str:
    """Returns the worst rank and the spread between ranks in one sentence."""
    whole = compared.peak
    if whole is None:
        return f"None of {len(compared.ranks)} ranks ran an operator while it was recorded."
    worst = next(one for one in compared.ranks if one.rank == compared.worst)
    on = f" on {printable(worst.node)}" if len({one.node for one in compared.ranks}) > 1 and worst.node else ""
    where = f"{worst.phase}{f' of {printable(worst.module)}' if worst.module else ''} ({printable(worst.op)})"
    if len(compared.ranks) < 2:
        return f"rank {worst.rank}{on} peaks at {format_bytes(whole.most)}, {where}"
    if not whole.bytes:
        return f"all {len(compared.ranks):,} ranks peak at {format_bytes(whole.most)}, rank {worst.rank}{on} in {where}"
    return (
        f"rank {worst.rank}{on} is worst of {len(compared.ranks):,}: peak {format_bytes(whole.most)} in {where}, "
        f"{format_percent(whole.imbalance)} above the median; rank {whole.least_rank} is lowest with "
        f"{format_bytes(whole.least)}"
    )


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


def show_leaks(traces: Sequence[Trace], rank: int | None, top: int | None, *, is_json: bool) -> None:
    """Prints what grows.

    Args:
        traces: One recording, or several of one job in their order.
        rank: The rank; None for the one with the highest peak.
        top: Maximum rows; None for the default.
        is_json: Print JSON instead.
    """
    chosen = [_of_rank(trace, rank) for trace in traces]
    page = Page.for_stdout()
    if len(chosen) > 1:
        series = compare_series(chosen)
        record = {"schema": LEAKS_SCHEMA, "is_growing": series.is_growing, **to_json(series)}
        _fill_series(page, series, top or _LEAK_ROWS)
    else:
        report = find_leaks(chosen[0])
        record = {"schema": LEAKS_SCHEMA, **to_json(report)}
        _fill(page, report, top or _LEAK_ROWS)
    if is_json:
        print(json.dumps(record, indent=2, allow_nan=False))
    else:
        page.write()


def _of_rank(trace: Trace, rank: int | None) -> Trace:
    if len(trace.ranks) == 1:
        return trace.rank_trace(trace.ranks[0])
    return trace.rank_trace(fullest_rank(trace) if rank is None else rank)


def _fill(page: Page, report: LeakReport, rows: int) -> None:
    page.add(Text(describe_growth(report.growth), style="bold"))
    if not report.leaks:
        return
    page.add(Text(describe_leak(report.leaks[0])))
    table = make_table(">per step", ">kept", ">tensors", ">since step", "made at", "held by")
    for leak in report.leaks[:rows]:
        table.add_row(*_row(leak))
    page.add(table)


def _row(leak: Leak) -> list[Text]:
    made = leak.line or leak.op or f"{leak.shape} {leak.dtype}".strip() or "another thread, or C++"
    return [
        cell(describe_rate(leak).removesuffix(" a step")),
        cell(format_bytes(leak.kept_bytes)),
        cell(f"{leak.tensors:,}"),
        cell("" if leak.since_step is None else str(leak.since_step)),
        cell(made),
        cell("unknown" if leak.held_by is None else describe_holder(leak.held_by)),
    ]


def _fill_series(page: Page, series: Series, rows: int) -> None:
    ends = ", ".join(format_bytes(size) for size in series.bytes)
    verdict = "grows from each recording to the next" if series.is_growing else "does not grow throughout"
    page.add(Text(f"Memory in use at the end {verdict}: {ends}.", style="bold"))
    if not series.lines:
        return
    table: Table = make_table(*(f">{name}" for name in series.names), "allocated at")
    for one in series.lines[:rows]:
        place = one.line or "(before the recording)"
        table.add_row(*(cell(format_bytes(size)) for size in one.bytes), cell(place))
    page.add(table)
