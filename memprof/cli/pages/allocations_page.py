"""The output of `memprof compare-allocations`."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from memprof.analysis.compared.comparison import AllocationComparison
from memprof.analysis.compared.comparison_words import difference_row, side_rows, verdict
from memprof.cli.page import Page, make_table, printable


def show_allocations(compared: AllocationComparison, top: int) -> None:
    """Prints a comparison.

    Args:
        compared: The two sequences.
        top: Kinds of differences to list at most.
    """
    page = Page.for_stdout()
    page.add(Text(verdict(compared), style="bold"))
    page.add_section("Both sides", _sides(compared), "requested bytes, rounded up to 512")
    if compared.differences:
        left_out = len(compared.differences) - top
        page.add_section(
            "Differences",
            _differences(compared, top),
            f"{left_out:,} more kinds: --top {len(compared.differences)}" if left_out > 0 else "",
        )
    page.write()


def _sides(compared: AllocationComparison) -> Table:
    table = make_table("", ">real", ">dry run", ">difference")
    for row in side_rows(compared):
        table.add_row(*map(printable, row))
    return table


def _differences(compared: AllocationComparison, top: int) -> Table:
    table = make_table("in the dry run", ">times", ">real", ">dry run", "operator", "line")
    for one in compared.differences[:top]:
        table.add_row(*map(printable, difference_row(one)))
    return table
