"""The tables of what grows: from step to step, and over recordings of one job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memprof.analysis.leaks.growth import Series
from memprof.analysis.leaks.leak import Leak, describe_holder, describe_rate
from memprof.analysis.table import BYTES, BYTES_CHANGE, COUNT, FIGURE, NUMBER, TEXT, Cell, FactTable, shown


def _tensor(leak: Leak) -> str:
    return f"{leak.shape} {leak.dtype}".strip()


LEAKS = (
    shown(
        "per step",
        FIGURE,
        lambda leak: Cell(describe_rate(leak).replace(" a step", ""), title=f"{leak.bytes_per_step:,} B"),
    ),
    shown("kept", BYTES, lambda leak: leak.kept_bytes),
    shown("tensors", COUNT),
    shown("since step", NUMBER, lambda leak: leak.since_step),
    shown("made at", TEXT, lambda leak: leak.line or leak.op, missing="unknown"),
    shown("held by", TEXT, lambda leak: leak.held_by and describe_holder(leak.held_by), missing="unknown"),
    shown("category", TEXT, lambda leak: Cell(leak.category, category=leak.category), is_wide=True),
    shown("tensor", TEXT, _tensor, is_wide=True),
)


def series_lines(series: Series, rows: int) -> FactTable:
    """Returns the lines that grow from each recording to the next."""

    def of_end(place: int) -> Callable[[Any], int]:
        return lambda line: line.bytes[place]

    columns = (
        *(shown(name, BYTES, of_end(place), key=f"end {place}") for place, name in enumerate(series.names)),
        shown("change", BYTES_CHANGE, lambda line: line.bytes[-1] - line.bytes[0]),
        shown("allocated at", TEXT, lambda line: line.line, missing="(allocated before recording)"),
    )
    return FactTable(columns, series.lines[:rows])
