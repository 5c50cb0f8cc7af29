"""Encodes one table as Parquet bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memprof.trace.schema import Column, Table

#: Durations are rounded to 2**-10 us: finer than any clock, and the low bytes become zero (a decimal place would
#: leave them full). Times are Unix time, which float64 resolves to a quarter of a microsecond.
_STEPS_PER_US = 1024.0

#: Arrow types by kind of column.
ARROW_TYPES: dict[str, pa.DataType] = {
    "id": pa.int64(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "text": pa.string(),
}


def encode_table(table: Table) -> bytes:
    """Writes a table as Parquet with zstd and page checksums; missing values become null.

    The same table gives the same bytes.
    """
    columns = table.columns()
    arrays = {column.name: _to_arrow(column, getattr(table, column.name)) for column in columns}
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table(arrays),
        sink,
        compression="zstd",
        compression_level=9,
        # pyarrow's stubs accept only True and False; its documentation allows the list of names.
        use_dictionary=[column.name for column in columns if column.kind == "text"],  # type: ignore[arg-type]
        column_encoding={
            column.name: _encoding(column, getattr(table, column.name)) for column in columns if column.kind != "text"
        },
        write_page_checksum=True,
        write_statistics=False,
        store_schema=False,
    )
    return sink.getvalue().to_pybytes()


def _to_arrow(column: Column, values: Any) -> pa.Array[Any]:
    kind = ARROW_TYPES[column.kind]
    if column.kind == "text":
        try:
            return pa.array(values, type=kind, mask=values == "")
        except UnicodeEncodeError:  # a file name that is not valid UTF-8 appears in a stack as lone surrogates
            return _to_arrow(column, np.array([_encodable(text) for text in values], dtype=object))
    if column.kind == "float":
        with np.errstate(over="ignore"):
            rounded = np.round(values * _STEPS_PER_US) / _STEPS_PER_US
        return pa.array(np.where(np.isfinite(rounded), rounded, values), type=kind, mask=np.isnan(values))
    mask = None if column.missing is None else values == column.missing
    return pa.array(values, type=kind, mask=mask)


def _encodable(text: str) -> str:
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
