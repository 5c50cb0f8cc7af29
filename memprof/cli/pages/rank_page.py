"""The page of `memprof report --by rank`: the worst rank, the spread between ranks, and the stragglers."""

from __future__ import annotations

import shlex

from rich.text import Text

from memprof.analysis.ranks.rank_report import RankComparison
from memprof.analysis.ranks.stragglers import Stragglers
from memprof.cli.page import Page, printable
from memprof.cli.pages import rank_tables as tables
from memprof.units import format_bytes, format_percent

_ROWS = 12


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
    page.add_section("Ranks", tables.peaks(compared, max(rows, 2)), "each at the peak of its own highest step")
    page.add_section("Spread by phase", tables.spreads(compared.phases, "phase", rows), "peaks")
    page.add_section("Spread by category", tables.spreads(compared.categories, "category", rows), "at the peaks")
    page.add_section("Spread by module", tables.spreads(compared.modules, "module", rows), "owner or allocator")
    page.add_section(
        "Stragglers at collectives", tables.stragglers(found, rows), found.describe_clocks() or "recorded steps"
    )
    page.add_section("Longest waits at collectives", tables.late_collectives(found, min(rows, 6)))
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
