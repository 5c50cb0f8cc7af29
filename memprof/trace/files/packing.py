"""Encodes one table of a recording as Parquet bytes, as small as it gets, and restores its columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from memprof.trace.files.coded import (
    CODINGS,
    DIFFERENCES,
    DISTANCES,
    ELSEWHERE,
    NEW,
    TICKS,
    TICKS_PER_US,
    Codings,
    differences,
    distances,
    from_distances,
    metadata_of,
    stored_name,
)
from memprof.trace.files.parquet import ARROW_TYPES, arrow_numbers, encodable, rounded, to_arrow, write_parquet
from memprof.trace.schema import Bools, Column, Ints, Table

#: Rows on which the codings of a column are compared.
_SAMPLE = 1 << 16
_SAMPLE_LEVEL = 3
#: What one more column takes in the file, its values aside.
_COLUMN_BYTES = 120
#: Largest time in microseconds that ticks hold.
_MOST_US = 2.0**52
#: zstd's level by the rows of a table: small tables gain a few per cent, large ones would take minutes.
_LEVELS = ((50_000, 19), (1_000_000, 9))
_LEVEL_BEYOND = 3


def pack_table(table: Table, others: Mapping[type[Table], Table]) -> bytes:
    """Writes a table as Parquet with coded columns; ``columns.decode_table`` reads it.

    Columns without any value are left out, as are those that equal another column or have one value throughout.
    Integers and times are stored as they are, as differences, or as distances to the last equal value, whichever is
    smallest. The same table gives the same bytes.
    """
    packer = _Packer(len(table))
    for column in table.columns():
        values = getattr(table, column.name)
        source = ELSEWHERE.get((type(table), column.name))
        if packer.stored and source and source[0] in others:
            other = getattr(others[source[0]], source[1])
            if np.array_equal(other, values):
                packer.same[column.name] = f"{source[0].table_name}.{source[1]}"
                continue
        packer.add(column, values)
    rows = len(table)
    level = next((level for most, level in _LEVELS if rows <= most), _LEVEL_BEYOND)
    return write_parquet(packer.stored, packer.encodings, level, metadata_of(packer.same, packer.constant))


class _Packer:
    """Collects the stored columns of a table.

    Attributes:
        stored: The columns by name, in file order.
        encodings: Parquet encodings of those that are not texts.
        same: Columns that are not stored, as they equal another.
        constant: Columns that are not stored, as every row has this value.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._numbers: dict[str, tuple[bool, Ints, Bools]] = {}
        self.stored: dict[str, pa.Array[Any]] = {}
        self.encodings: dict[str, str] = {}
        self.same: dict[str, str] = {}
        self.constant: dict[str, Any] = {}

    def add(self, column: Column, values: Any) -> None:
        """Adds a column; the first one is always stored, since a file without columns has no rows."""
        if self.stored and self._is_left_out(column, values):
            return
        if column.kind == "text":
            self.stored[column.name] = to_arrow(column, values)
        elif column.kind == "bool":
            self._store(column.name, to_arrow(column, values), "PLAIN")
        else:
            self._add_numbers(column, values)

    def _is_left_out(self, column: Column, values: Any) -> bool:
        if not self._rows:
            return True
        if column.kind == "float" and not np.isfinite(values[0]):
            return bool(np.isnan(values).all())
        first = values[0]
        if np.any(values[:_SAMPLE] != first) or np.any(values != first):
            return False
        if first != (0 if column.missing is None else column.missing):
            self.constant[column.name] = encodable(first) if column.kind == "text" else first.item()
        return True

    def _add_numbers(self, column: Column, values: Any) -> None:
        is_time = column.kind == "float"
        known = ~np.isnan(values) if is_time else values != column.missing
        if is_time:
            if not np.all(np.abs(values[known]) < _MOST_US):
                self._store(column.name, to_arrow(column, values), "BYTE_STREAM_SPLIT")
                return
            values = np.where(known, rounded(values) * TICKS_PER_US, 0).astype(np.int64)
        for name, (is_other_time, other, other_known) in self._numbers.items():
            if is_other_time == is_time and np.array_equal(other, values) and np.array_equal(other_known, known):
                self.same[column.name] = name
                return
        self._numbers[column.name] = is_time, values, known
        mask = None if known.all() else ~known
        suffix = TICKS if is_time else ""
        self._store_smallest(column.name, suffix, values if mask is None else values[known], mask)

    def _store_smallest(self, name: str, suffix: str, values: Ints, mask: Bools | None) -> None:
        sample = values[:_SAMPLE]
        changes, (apart, new) = differences(sample), distances(sample)
        sizes = (_size(sample), _size(changes), _size(apart) + _size(new) + _COLUMN_BYTES)
        best = sizes.index(min(sizes))
        if best == 1:
            suffix += DIFFERENCES
            values = differences(values)
        elif best == 2:
            suffix += DISTANCES
            values, new = distances(values)
            is_beyond = np.arange(self._rows) >= len(new)
            self._store(stored_name(name, NEW), _spread(new, is_beyond), "BYTE_STREAM_SPLIT")
        stored = arrow_numbers(values) if mask is None else _spread(values, mask)
        self._store(stored_name(name, suffix), stored, "BYTE_STREAM_SPLIT")

    def _store(self, name: str, values: pa.Array[Any], encoding: str) -> None:
        self.stored[name] = values
        self.encodings[name] = encoding


def _spread(known: Ints, mask: Bools) -> pa.Array[Any]:
    """Returns a column with some nulls."""
    return arrow_numbers(_laid_out(known, ~mask), mask)


def _size(values: Ints) -> int:
    """Returns about how many bytes the values take, byte stream split and compressed."""
    split = np.ascontiguousarray(values).view(np.uint8).reshape(-1, 8).T.tobytes()
    return int(pa.Codec("zstd", compression_level=_SAMPLE_LEVEL).compress(split).size) if split else 0


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
            known = np.cumsum(known, dtype=np.int64)
        else:
            new = _joined(stored, names[1], pa.int64())
            known = from_distances(known, _numbers(new, dtype)[: len(new) - new.null_count])
        numbers = known if is_known is None else _laid_out(known, is_known)
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
    return np.broadcast_to(np.asarray(value, dtype=column.dtype), rows)


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


def _laid_out(known: Any, is_known: Bools) -> Any:
    values = np.zeros(len(is_known), dtype=np.int64)
    values[is_known] = known
    return values
