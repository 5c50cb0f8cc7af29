"""The tables of predicted figures against recorded and measured ones, by counter, phase and category."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter

from memprof.analysis.plans.predict import Side
from memprof.analysis.table import BYTES, BYTES_CHANGE, FIGURE, RATIO_CHANGE, TEXT, Cell, Column, FactTable, shown
from memprof.phases import in_order
from memprof.trace.schema import CATEGORIES as ALL_CATEGORIES
from memprof.units import format_bytes, format_bytes_change, format_percent_change, format_us, format_us_change


def compared_columns(kind: str) -> tuple[Column, ...]:
    """Returns the columns of predicted and measured bytes.

    Args:
        kind: ``phase`` or ``category``, what the bytes are of.
    """
    return (
        Column(kind, None, TEXT, attrgetter("name")),
        shown(kind, TEXT, lambda row: _named(kind, row.name), key="name"),
        Column("predicted_bytes", "predicted", BYTES),
        Column("measured_bytes", "measured", BYTES),
        Column("error_bytes", "error", BYTES_CHANGE),
        shown(
            "of measured",
            RATIO_CHANGE,
            lambda row: row.error_bytes / row.measured_bytes if row.measured_bytes else None,
        ),
    )


PHASES, CATEGORIES = compared_columns("phase"), compared_columns("category")


def _named(kind: str, name: str) -> Cell:
    return Cell(name, category=name if kind == "category" else "")


def changes(kind: str, before: Side, after: Side) -> FactTable:
    """Returns recorded and predicted bytes; of categories, the last row is the total.

    Args:
        kind: ``phase`` or ``category``, what the bytes are of.
        before: The recorded step.
        after: The predicted step.
    """
    columns = (
        shown(kind, TEXT, lambda row: _named(kind, row[0]), key="name"),
        shown("recorded", BYTES, lambda row: row[1]),
        shown("predicted", BYTES, lambda row: row[2]),
        shown("change", BYTES_CHANGE, lambda row: row[2] - row[1]),
    )
    if kind == "phase":
        old, new = ({name: one.allocated_bytes for name, one in side.phases.items()} for side in (before, after))
        first = tuple(in_order((*old, *new)))
    else:
        old, new, first = before.categories, after.categories, ALL_CATEGORIES
    names = [*first, *sorted({*old, *new} - set(first))]
    rows = [(name, old.get(name, 0), new.get(name, 0)) for name in names if old.get(name) or new.get(name)]
    table = FactTable(columns, rows)
    if kind == "category":
        sums = sum(old.values()), sum(new.values())
        table.add("total", name=Cell("total"), recorded=sums[0], predicted=sums[1], change=sums[1] - sums[0])
    return table


def counters(peaks: Iterable[int], times_us: Iterable[float], phases: Iterable[str] = ()) -> FactTable:
    """Returns the predicted and measured peak and step time.

    Args:
        peaks: Predicted and measured peak in bytes.
        times_us: Predicted and measured step time.
        phases: The phases of the peaks.
    """
    (peak, was), (time_us, was_us) = peaks, times_us
    rows = (
        ("peak allocated", format_bytes(peak), format_bytes(was), format_bytes_change(peak - was), peak, was),
        ("step time", format_us(time_us), format_us(was_us), format_us_change(time_us - was_us), time_us, was_us),
    )
    where = ", measured ".join(dict.fromkeys(phases))
    columns = (
        shown("counter", TEXT, lambda row: row[0]),
        shown("predicted", FIGURE, lambda row: row[1]),
        shown("measured", FIGURE, lambda row: row[2]),
        shown("error", FIGURE, lambda row: row[3]),
        shown("of measured", FIGURE, lambda row: describe_error(*row[4:])),
        shown("peak in", TEXT, lambda row: where if row is rows[0] else "", is_optional=True),
    )
    return FactTable(columns, rows)


def describe_error(predicted: float, measured: float) -> str:
    """Returns an error as a share of what was measured: ``+1.2 %``, ``exact``; "" where it is unknown."""
    if not (measured and math.isfinite(measured) and math.isfinite(predicted)):
        return ""
    return "exact" if predicted == measured else format_percent_change(predicted / measured - 1)
