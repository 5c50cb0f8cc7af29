"""The pages of `memprof report` for one question: --by rank, and --leaks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from memprof.analysis.allocator.allocator_report import fullest_rank
from memprof.analysis.host.host_processes import HostGrowth
from memprof.analysis.host.host_use import HostUse
from memprof.analysis.leaks.growth import Series, compare_series
from memprof.analysis.leaks.leak import describe_leak
from memprof.analysis.leaks.leak_tables import LEAKS, series_lines
from memprof.analysis.leaks.leaks import LeakReport, describe_leaks, find_leaks
from memprof.analysis.ranks import rank_tables as tables
from memprof.analysis.ranks.rank_report import RankComparison
from memprof.analysis.ranks.stragglers import Stragglers
from memprof.analysis.report.run_tables import HOST_GROWTH
from memprof.analysis.table import FactTable, records
from memprof.cli.page import Page, show
from memprof.json_values import to_json
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_percent, printable

_ROWS = 12
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
    page.say(describe_ranks(compared), "bold")
    page.warn(*notes)
    page.add_section("Ranks", tables.peaks(compared, max(rows, 2)), "each at the peak of its own highest step")
    page.add_section("Spread by phase", tables.spreads(compared.phases, "phase", rows), "peaks")
    page.add_section("Spread by category", tables.spreads(compared.categories, "category", rows), "at the peaks")
    page.add_section("Spread by module", tables.spreads(compared.modules, "module", rows), "owner or allocator")
    clocks = found.describe_clocks() or "recorded steps"
    page.add_section("Stragglers at collectives", tables.stragglers(found, rows), clocks)
    page.add_section("Longest waits at collectives", tables.late_collectives(found, min(rows, 6)))
    if compared.worst is not None:
        page.add_next((f"memprof report {shlex.quote(trace)} --rank {compared.worst}", "what fills the worst rank"))


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


def show_leaks(traces: Sequence[Trace], rank: int | None, top: int | None, *, is_json: bool) -> None:
    """Prints what grows.

    Args:
        traces: One recording, or several of one job in their order.
        rank: The rank; None for the one with the highest peak.
        top: Maximum rows; None for the default.
        is_json: Print JSON instead.
    """
    chosen = [_of_rank(trace, rank) for trace in traces]
    rows = top or _LEAK_ROWS
    found = compare_series(chosen) if len(chosen) > 1 else find_leaks(chosen[0])
    more = {"is_growing": found.is_growing} if isinstance(found, Series) else {}
    host = HostUse.of(chosen[0] if rank is not None else traces[0]).growth if len(chosen) == 1 else ()
    show(
        lambda page: _fill_series(page, found, rows) if isinstance(found, Series) else _fill(page, found, host, rows),
        lambda: {"schema": LEAKS_SCHEMA, **more, **to_json(found), "host_growth": records(HOST_GROWTH, host)},
        is_json=is_json,
    )


def _of_rank(trace: Trace, rank: int | None) -> Trace:
    if len(trace.ranks) == 1:
        return trace.rank_trace(trace.ranks[0])
    return trace.rank_trace(fullest_rank(trace) if rank is None else rank)


def _fill(page: Page, report: LeakReport, host: Sequence[HostGrowth], rows: int) -> None:
    page.say(describe_leaks(report), "bold")
    if report.growth.bytes_per_step == 0 and report.growth.how == "storages":
        page.say("What is kept less often, such as once an epoch, shows over a whole run: `memprof record --light`.")
    for growth in host:
        page.say(growth.describe())
    if not report.leaks:
        return
    page.say(describe_leak(report.leaks[0]))
    page.add(FactTable(LEAKS, report.leaks[:rows]))


def _fill_series(page: Page, series: Series, rows: int) -> None:
    ends = ", ".join(format_bytes(size) for size in series.bytes)
    verdict = "grows from each recording to the next" if series.is_growing else "does not grow throughout"
    page.say(f"Memory in use at the end {verdict}: {ends}.", "bold")
    if series.lines:
        page.add(series_lines(series, rows))
