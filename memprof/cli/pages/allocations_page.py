"""The output of `memprof compare-allocations`."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from memprof.analysis.compared.comparison import AllocationComparison, peak_allocation
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


def verdict(compared: AllocationComparison) -> str:
    """Returns the comparison in one line."""
    real = compared.real
    parts = [
        f"{compared.equal:,} of {len(real):,} allocations equal",
        f"peak {_error(compared.peak_error_bytes, real.peak_bytes)}",
    ]
    error = compared.reserved_error_bytes
    if error is not None:
        parts.append(f"reserved {_error(error, real.peak_reserved_bytes)}")
    return ", ".join(parts)


def _error(error: int, real_bytes: int) -> str:
    if error == 0:
        return "equal to the byte"
    share = f"{100 * error / real_bytes:+.3f} %".replace("-", "\u2212") if real_bytes else "not zero"
    return f"{share} ({_change(error, ' B')})"


def _sides(compared: AllocationComparison) -> Table:
    real, dry = compared.real, compared.dry
    table = make_table("", ">real", ">dry run", ">difference")
    table.add_row("allocations", f"{len(real):,}", f"{len(dry):,}", _difference(len(dry) - len(real), ""))
    rows = [
        ("live at the beginning", real.start_bytes, dry.start_bytes),
        ("peak", real.peak_bytes, dry.peak_bytes),
        ("live at the end", real.end_bytes, dry.end_bytes),
        ("reserved at the beginning", real.start_reserved_bytes, dry.start_reserved_bytes),
        ("peak of reserved", real.peak_reserved_bytes, dry.peak_reserved_bytes),
        ("reserved at the end", real.end_reserved_bytes, dry.end_reserved_bytes),
    ]
    for what, one, other in rows:
        if one >= 0 and other >= 0:
            table.add_row(what, format_bytes(one), format_bytes(other), _difference(other - one, " B"))
    table.add_row(
        "segments at the end", f"{real.segments:,}", f"{dry.segments:,}", _difference(dry.segments - real.segments, "")
    )
    table.add_row("peak in", printable(peak_allocation(real)), printable(peak_allocation(dry)), "")
    table.add_row("torch", printable(real.torch), printable(dry.torch), "")
    return table


def _difference(value: int, unit: str) -> str:
    return "equal" if value == 0 else _change(value, unit)


def _change(value: int, unit: str) -> str:
    return f"{value:+,}{unit}".replace("-", "\u2212")


def _differences(compared: AllocationComparison, top: int) -> Table:
    table = make_table("in the dry run", ">times", ">real", ">dry run", "operator", "line")
    for one in compared.differences[:top]:
        operator = f"{one.operator or 'unknown'}{', backward' if one.is_backward else ''}"
        table.add_row(
            one.kind,
            f"{one.count:,}",
            format_bytes(one.real_bytes) if one.real_bytes else "",
            format_bytes(one.dry_bytes) if one.dry_bytes else "",
            printable(operator),
            printable(one.place),
        )
    return table
