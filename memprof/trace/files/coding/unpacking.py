"""Restores the columns of a table from what is stored of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from memprof.trace.files.coding.codings import CODINGS, DIFFERENCES, DISTANCES, TICKS, TICKS_PER_US, Codings
from memprof.trace.files.coding.series import from_differences, from_distances
from memprof.trace.files.encoding import ARROW_TYPES
from memprof.trace.schema import Bools, Column


def restored(column: Column, codings: Codings, stored: pa.Table) -> Any:
    """Returns a column of numbers or booleans as numpy, nulls replaced by its missing value.

    Args:
        column: The column.
        codings: How it is coded.
        stored: The stored columns, its own and the one of its new values included.

    Raises:
        ValueError: The stored columns contradict the codings.
    """
    names = codings.stored_names(column.name)
    suffix = codings.stored[codings.source(column.name)]
    if suffix not in CODINGS:
        raise ValueError(f"column {column.name!r} has the unknown coding {suffix!r:.20}")
    is_ticks = TICKS in suffix
    if is_ticks and column.kind != "float":
        raise ValueError(f"column {column.name!r} holds times")
    dtype: Any = np.dtype(np.int64 if is_ticks else column.dtype)
    values = _joined(stored, names[0], pa.int64() if is_ticks else ARROW_TYPES[column.kind])
    is_known = _validity(values)
    numbers = _numbers(values, dtype)
    if DIFFERENCES in suffix or DISTANCES in suffix:
        if dtype != np.int64:
            raise ValueError(f"column {column.name!r} cannot be coded")
        known = numbers if is_known is None else numbers[is_known]
        if DIFFERENCES in suffix:
            known = from_differences(known)
        else:
            new = _joined(stored, names[1], pa.int64())
            known = from_distances(known, _numbers(new, dtype)[: len(new) - new.null_count])
        numbers = known if is_known is None else _spread(known, is_known)
    if is_ticks:
        numbers = numbers / TICKS_PER_US
    return numbers if is_known is None else np.where(is_known, numbers, np.asarray(missing(column), column.dtype))


def constant_column(column: Column, value: Any, rows: int) -> Any:
    """Returns a column of numbers or booleans of which every row has a value that was read from a file.

    Raises:
        ValueError: The column cannot have it.
    """
    expected = {"bool": bool, "float": float}.get(column.kind, int)
    if type(value) is not expected:
        raise ValueError(f"column {column.name!r} cannot be {value!r:.60}")
    return np.full(rows, value, dtype=column.dtype)


def missing(column: Column) -> Any:
    """Returns the value of a column that the file lacks."""
    if column.missing is not None:
        return column.missing
    return False if column.kind == "bool" else 0


def as_numpy(values: pa.Array[Any], dtype: Any, fill: Any) -> Any:
    """Returns an Arrow array of numbers or booleans as numpy, nulls replaced.

    Reads its buffers directly: Arrow's own ``to_numpy`` and ``fill_null`` import pandas, which takes half a second.
    """
    is_known = _validity(values)
    numbers = _numbers(values, np.dtype(dtype))
    return numbers if is_known is None else np.where(is_known, numbers, np.asarray(fill, dtype=dtype))


def as_type(values: Any, kind: pa.DataType) -> Any:
    """Converts an Arrow array, if it has another type: Arrow's cast imports pydoc and more."""
    return values if values.type == kind else values.cast(kind)


def _joined(stored: pa.Table, name: str, kind: pa.DataType) -> Any:
    return as_type(stored.column(name), kind).combine_chunks()


def _validity(values: pa.Array[Any]) -> Bools | None:
    """Returns which values are not null; None where all are."""
    buffer = values.buffers()[0]
    if buffer is None or not values.null_count:
        return None
    return _bits(buffer)[values.offset : values.offset + len(values)]


def _numbers(values: pa.Array[Any], dtype: Any) -> Any:
    """Returns the values, anything where they are null."""
    data = values.buffers()[1]
    inside = slice(values.offset, values.offset + len(values))
    if data is None:
        return np.empty(0, dtype=dtype)
    return _bits(data)[inside] if dtype == np.bool_ else np.frombuffer(memoryview(data), dtype=dtype)[inside]


def _bits(buffer: pa.Buffer) -> Bools:
    return np.unpackbits(np.frombuffer(memoryview(buffer), dtype=np.uint8), bitorder="little").view(np.bool_)


def _spread(known: Any, is_known: Bools) -> Any:
    values = np.zeros(len(is_known), dtype=np.int64)
    values[is_known] = known
    return values
