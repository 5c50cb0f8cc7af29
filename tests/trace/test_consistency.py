"""Invariants of a recording's tables, violated in one value at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memprof.trace.consistency import InvariantError, check_tables
from memprof.trace.schema import Memory, Ops, Steps, Storages, Table
from tests.building import Tables


def broken(tables: Tables, kind: type[Table], column: str, value: float) -> Tables:
    """Returns the tables with another value in the first row of a column."""
    values = np.array(getattr(tables[kind], column))
    values[0] = value
    return {**tables, kind: dataclasses.replace(tables[kind], **{column: values})}


def test_what_was_written_by_hand_keeps_every_promise(small_tables: Tables) -> None:
    """The tables that the others are made of are accepted."""
    check_tables(small_tables)


@pytest.mark.parametrize(
    ("kind", "column", "value"),
    [
        (Storages, "allocated_bytes", -1),
        (Storages, "requested_bytes", 2**61),
        (Ops, "flops", -1),
        (Ops, "duration_us", 1e300),
        (Ops, "op_id", 1),
        (Ops, "step", 17),
        (Steps, "step", 1),
        (Ops, "module_id", -2),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_column(
    small_tables: Tables, kind: type[Table], column: str, value: float
) -> None:
    """A negative size or count, an endless time, a number out of order, an id of nothing."""
    with pytest.raises(InvariantError, match=column.removesuffix("_us")):
        check_tables(broken(small_tables, kind, column, value))


def test_counters_of_memory_may_be_below_zero(small_tables: Tables) -> None:
    """What was allocated before a recording and is freed in it takes a device's counters below zero."""
    check_tables(broken(small_tables, Memory, "allocated_bytes", -5))
