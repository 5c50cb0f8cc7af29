"""Parquet bytes of one table: encoded, and the unpacked size that their pages claim.

The footer's figures are not binding: memory is allocated by the size in each page header. So a file of a few
kilobytes could be made to allocate gigabytes; such files are rejected here.

Source: parquet.thrift (PageHeader) and the compact protocol of Apache Thrift.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memprof.trace.files.coded import TICKS_PER_US, Coded
from memprof.trace.schema import Bools, Column, Floats, Table, Texts

_LEVEL = 9
#: Arrow types by kind of column.
ARROW_TYPES: dict[str, pa.DataType] = {
    "id": pa.int64(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "text": pa.string(),
}
#: Types of the compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_UNPACKED, _PACKED = 2, 3
#: Maximum nesting depth of fields in a page header.
_DEEPEST = 6


def encode_table(table: Table) -> bytes:
    """Writes a table as plain Parquet, for any reader; missing values become null.

    The same table gives the same bytes.
    """
    return encode_columns(table.columns(), lambda column: getattr(table, column.name))


def encode_columns(columns: Sequence[Column], read: Callable[[Column], Any]) -> bytes:
    """Writes columns as `encode_table` does, holding one at a time in addition to what is written.

    Args:
        columns: The columns.
        read: Returns a column's values; texts may be ``Coded``.
    """
    arrays: dict[str, pa.Array[Any]] = {}
    encodings: dict[str, str] = {}
    for column in columns:
        values = read(column)
        arrays[column.name] = to_arrow(column, values)
        if column.kind != "text":
            encodings[column.name] = _encoding(column, values)
    return write_parquet(arrays, encodings, _LEVEL, {})


def write_parquet(
    arrays: Mapping[str, pa.Array[Any]], encodings: Mapping[str, str], level: int, metadata: Mapping[str, str]
) -> bytes:
    """Writes columns as Parquet with zstd and page checksums.

    Args:
        arrays: The columns by name.
        encodings: Encoding of each column that is not a text; texts are dictionary-encoded.
        level: zstd's level.
        metadata: The file's metadata.
    """
    fields = [pa.field(name, values.type, nullable=values.null_count > 0) for name, values in arrays.items()]
    table = pa.table(list(arrays.values()), schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        compression_level=level,
        # pyarrow's stubs accept only True and False; its documentation allows the list of names.
        use_dictionary=[name for name in arrays if name not in encodings],  # type: ignore[arg-type]
        column_encoding=dict(encodings),
        write_page_checksum=True,
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(table)
        if metadata:
            writer.add_key_value_metadata(dict(metadata))
    return sink.getvalue().to_pybytes()


def to_arrow(column: Column, values: Any) -> pa.Array[Any]:
    """Returns a column as it is stored in plain Parquet: times rounded, missing values null."""
    if isinstance(values, Coded):
        codes: Any = arrow_numbers(values.codes, (values.distinct == "")[values.codes])
        return pa.DictionaryArray.from_arrays(codes, arrow_texts(values.distinct))
    if column.kind == "text":
        return arrow_texts(values, values == "")
    if column.kind == "float":
        return arrow_numbers(rounded(values), np.isnan(values))
    return arrow_numbers(values, None if column.missing is None else values == column.missing)


def arrow_numbers(values: Any, mask: Bools | None = None) -> pa.Array[Any]:
    """Returns numbers or booleans as Arrow, with nulls where a mask is set.

    ``pa.array`` would import pandas, which takes longer than to write a small recording.
    """
    data = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    kind: Any = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [_validity(mask), _buffer(data)])


def arrow_texts(texts: Sequence[str] | Texts, mask: Bools | None = None) -> pa.Array[Any]:
    """Returns texts as Arrow, with nulls where a mask is set; see ``arrow_numbers``."""
    of_text = {text: text.encode("utf-8", "backslashreplace") for text in set(texts)}  # see encodable
    encoded = list(map(of_text.__getitem__, texts))
    ends = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=ends[1:])
    data, validity = _buffer(b"".join(encoded)), _validity(mask)
    if ends[-1] < 2**31:  # a cast would import pyarrow's functions, which takes longer than a small recording
        return pa.StringArray.from_buffers(len(encoded), _buffer(ends.astype(np.int32)), data, validity)
    return pa.LargeStringArray.from_buffers(len(encoded), _buffer(ends), data, validity).cast(ARROW_TYPES["text"])


def _validity(mask: Bools | None) -> pa.Buffer | None:
    return None if mask is None else _buffer(np.packbits(~mask, bitorder="little"))


def _buffer(data: Any) -> pa.Buffer:
    """Wraps an array or bytes without a copy; pyarrow's stubs know of no numpy arrays."""
    return pa.py_buffer(data)


def rounded(times_us: Floats) -> Floats:
    """Rounds times to 2**-10 us; those too large for it have no finer digits."""
    with np.errstate(over="ignore"):
        near = np.round(times_us * TICKS_PER_US) / TICKS_PER_US
    return np.where(np.isfinite(near), near, times_us)


def encodable(text: str) -> str:
    """Returns a text as UTF-8 can hold it: lone surrogates escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _encoding(column: Column, values: Any) -> str:
    """Chooses the encoding that was smallest after zstd on recordings of real jobs.

    Ascending ids, and operator ids, which advance from step to step, have small deltas. All other integers repeat in
    every step, and zstd finds repeats in plain values only. Only the low bytes of a time are noise, so times use
    byte stream split.
    """
    if column.kind == "float":
        return "BYTE_STREAM_SPLIT"
    known = values[values != column.missing]
    is_rising = column.kind == "id" and bool(np.all(known[1:] >= known[:-1]))
    return "DELTA_BINARY_PACKED" if is_rising or column.name.endswith("op_id") else "PLAIN"


class PageError(ValueError):
    """A page header cannot be read, or points outside the table."""


def unpacked_bytes(data: Any) -> int:
    """Sums the claimed unpacked size of all pages.

    Pages are contiguous from the file's magic to its footer, so the footer's column offsets need not be trusted;
    damaged offsets would crash the process inside Arrow.

    Raises:
        PageError: A header is damaged, or points outside the file.
    """
    view = memoryview(data)
    end = len(view) - 8 - int.from_bytes(view[-8:-4], "little")
    if end < 4:
        raise PageError("its footer is longer than the table")
    return _column_bytes(view, 4, end)


def _column_bytes(view: memoryview, position: int, end: int) -> int:
    total = 0
    while position < end:
        reader = _Reader(view, position, end)
        fields = reader.struct()
        unpacked, packed = fields.get(_UNPACKED), fields.get(_PACKED)
        if unpacked is None or packed is None or unpacked < 0 or packed < 0:
            raise PageError("a page header has no size")
        total += unpacked
        position = reader.position + packed
        if position > end:
            raise PageError("a page is longer than the table")
    return total


class _Reader:
    """Reads the integers of one struct and skips everything else."""

    def __init__(self, view: memoryview, position: int, end: int) -> None:
        self.position = position
        self._view = view
        self._end = end

    def struct(self, depth: int = 0) -> dict[int, int]:
        if depth > _DEEPEST:
            raise PageError("a page header is nested too deep")
        fields: dict[int, int] = {}
        number = 0
        while True:
            head = self._byte()
            if head == 0:
                return fields
            kind, delta = head & 0x0F, head >> 4
            number = number + delta if delta else self._signed()
            if kind in (_I16, _I32, _I64):
                fields[number] = self._signed()
            else:
                self._skip(kind, depth)

    def _skip(self, kind: int, depth: int) -> None:
        if kind in (_TRUE, _FALSE):
            return
        if kind == _BYTE:
            self._move(1)
        elif kind == _DOUBLE:
            self._move(8)
        elif kind == _BINARY:
            self._move(self._unsigned())
        elif kind == _STRUCT:
            self.struct(depth + 1)
        else:
            # A page header holds no lists, sets or maps.
            raise PageError("a page header has an invalid field type")

    def _byte(self) -> int:
        self._move(1)
        return self._view[self.position - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise PageError("a page header holds a number that is too long")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _move(self, count: int) -> None:
        self.position += count
        if self.position > self._end:
            raise PageError("a page header is cut short")
