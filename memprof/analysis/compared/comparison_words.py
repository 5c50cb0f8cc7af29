"""A comparison of allocations in words and figures, and as JSON containers."""

from __future__ import annotations

from operator import attrgetter

from memprof.analysis.compared.comparison import AllocationComparison, peak_allocation
from memprof.analysis.table import BYTES, COUNT, FIGURE, NAME, TEXT, Column, FactTable, record, shown
from memprof.json_values import Json, to_json
from memprof.units import format_bytes, format_bytes_change

#: Version of the keys.
COMPARISON_SCHEMA = 1


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


_SIDES = (
    shown("", TEXT, lambda row: row[0], key="what"),
    shown("real", FIGURE, lambda row: row[1]),
    shown("dry run", FIGURE, lambda row: row[2]),
    shown("difference", FIGURE, lambda row: row[3]),
)


def sides(compared: AllocationComparison) -> FactTable:
    """Returns both sides' figures, and their differences."""
    real, dry = compared.real, compared.dry
    rows = [("allocations", f"{len(real):,}", f"{len(dry):,}", _difference(len(dry) - len(real)))]
    for what, one, other in (
        ("live at the beginning", real.start_bytes, dry.start_bytes),
        ("peak", real.peak_bytes, dry.peak_bytes),
        ("live at the end", real.end_bytes, dry.end_bytes),
        ("reserved at the beginning", real.start_reserved_bytes, dry.start_reserved_bytes),
        ("peak of reserved", real.peak_reserved_bytes, dry.peak_reserved_bytes),
        ("reserved at the end", real.end_reserved_bytes, dry.end_reserved_bytes),
    ):
        if one >= 0 and other >= 0:
            apart = "equal" if one == other else _with_minus(format_bytes_change(other - one))
            rows.append((what, format_bytes(one), format_bytes(other), apart))
    segments = _difference(dry.segments - real.segments)
    rows += [
        ("segments at the end", f"{real.segments:,}", f"{dry.segments:,}", segments),
        ("peak in", peak_allocation(real), peak_allocation(dry), ""),
        ("torch", real.torch, dry.torch, ""),
    ]
    return FactTable(_SIDES, rows)


DIFFERENCES = (
    shown("in the dry run", TEXT, lambda one: one.kind),
    shown("times", COUNT, lambda one: one.count),
    shown("real", BYTES, lambda one: one.real_bytes or None),
    shown("dry run", BYTES, lambda one: one.dry_bytes or None),
    shown("operator", TEXT, lambda one: f"{one.operator or 'unknown'}{', backward' if one.is_backward else ''}"),
    shown("line", NAME, lambda one: one.place),
)


def change(value: int, unit: str) -> str:
    """Returns a number with its sign, a true minus, and its unit."""
    return _with_minus(f"{value:+,}{unit}")


def _with_minus(number: str) -> str:
    return number.replace("-", "\N{MINUS SIGN}")


def _error(error: int, real_bytes: int) -> str:
    if error == 0:
        return "equal to the byte"
    share = _with_minus(f"{100 * error / real_bytes:+.3f} %") if real_bytes else "not zero"
    return f"{share} ({change(error, ' B')})"


def _difference(value: int) -> str:
    return "equal" if value == 0 else change(value, "")


SEQUENCES = (
    Column("source"),
    Column("torch_version", read=attrgetter("torch")),
    Column("allocations", None, COUNT, len),
    Column("start_bytes", None, BYTES),
    Column("peak_bytes", None, BYTES),
    Column("peak_at", read=peak_allocation),
    Column("end_bytes", None, BYTES),
    Column("peak_reserved_bytes", None, BYTES, lambda one: _known(one.peak_reserved_bytes)),
    Column("end_reserved_bytes", None, BYTES, lambda one: _known(one.end_reserved_bytes)),
    Column("segments", None, COUNT),
)


def _known(size: int) -> int | None:
    return size if size >= 0 else None


def comparison_to_json(compared: AllocationComparison) -> Json:
    """Returns the output of `memprof diff --allocations`."""
    return {
        "schema": COMPARISON_SCHEMA,
        "equal_in_order": compared.equal,
        "equal_in_any_order": compared.equal_in_any_order,
        "peak_error_bytes": compared.peak_error_bytes,
        "reserved_error_bytes": compared.reserved_error_bytes,
        "real": record(SEQUENCES, compared.real),
        "dry_run": record(SEQUENCES, compared.dry),
        "differences": to_json(compared.differences),
    }
