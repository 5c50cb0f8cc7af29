"""Encodes one table as Parquet bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memprof.trace.files.coded import TICKS_PER_US, Coded
from memprof.trace.schema import Column, Floats, Table

_LEVEL = 9

#: Arrow types by kind of column.
ARROW_TYPES: dict[str, pa.DataType] = {
    "id": pa.int64(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "text": pa.string(),
}


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
    kind = ARROW_TYPES[column.kind]
    if isinstance(values, Coded):
        codes: Any = pa.array(values.codes, mask=(values.distinct == "")[values.codes])
        return pa.DictionaryArray.from_arrays(codes, pa.array(map(encodable, values.distinct), type=kind))
    if column.kind == "text":
        try:
            return pa.array(values, type=kind, mask=values == "")
        except UnicodeEncodeError:  # a file name that is not valid UTF-8 appears in a stack as lone surrogates
            return to_arrow(column, np.array([encodable(text) for text in values], dtype=object))
    if column.kind == "float":
        return pa.array(rounded(values), type=kind, mask=np.isnan(values))
    mask = None if column.missing is None else values == column.missing
    return pa.array(values, type=kind, mask=mask)


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
