"""The output of `memprof compare-allocations`."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from memprof.analysis.compared.comparison import AllocationComparison
from memprof.analysis.compared.comparison_words import difference_row, side_rows, verdict
from memprof.cli.page import Page, make_table, printable
from memprof.units import format_bytes


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


#: Columns of the table.
COLUMNS = (
    "run",
    "card, torch",
    "allocations of the GPU",
    "equal, in order",
    "more in the dry run",
    "peak of the GPU",
    "error of the peak",
    "of the end",
    "of reserved memory",
)


def describe_row(compared: AllocationComparison, device: str) -> str:
    """Returns a comparison as a row of Markdown, without names of files or paths of the user's.

    Args:
        compared: The two sequences.
        device: The simulated device; "" where both files existed.
    """
    real, dry = compared.real, compared.dry
    error = compared.reserved_error_bytes
    cells = (
        "(what the script does)",
        f"{device or '(card)'}, {real.torch or '(version)'}, dry run with {dry.torch or '(version)'}",
        f"{len(real):,}",
        f"{compared.equal:,}",
        f"{len(dry) - compared.equal:,}",
        format_bytes(real.peak_bytes),
        _error(compared.peak_error_bytes, real.peak_bytes),
        _error(dry.end_bytes - real.end_bytes, real.end_bytes),
        "unknown" if error is None else _error(error, real.peak_reserved_bytes),
    )
    return f"| {' | '.join(cells)} |"


def _error(error: int, real_bytes: int) -> str:
    if not error:
        return "0 B"
    share = f" ({100 * error / real_bytes:+.2f} %)" if real_bytes else ""
    return f"{error:+,} B{share}"
