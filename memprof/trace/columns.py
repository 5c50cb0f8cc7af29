"""One table as the bytes of a Parquet file, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from memprof.trace.schema import Column, Table, Texts

T = TypeVar("T", bound=Table)

#: Most bytes one table may take in memory: far above any recording, and far below what a few kilobytes of
#: run-length encoded Parquet can be made to claim.
TABLE_LIMIT_BYTES = 32 * 1024**3

#: Durations are rounded to 2**-10 us: finer than any clock, and the low bytes become zero. (A decimal place would
#: leave them full.) Moments are Unix time, whose float64 has no more than a quarter of a microsecond.
_STEPS_PER_US = 1024.0

_ARROW_TYPES: dict[str, pa.DataType] = {
    "id": pa.int64(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "text": pa.string(),
}


class CorruptTableError(Exception):
    """Bytes that are no such table; whoever knows the file makes a sentence of it."""


#: What reading damaged or hostile Parquet raises.
_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError)


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
        # pyarrow's stubs know only True and False; its documentation has the list of names.
        use_dictionary=[column.name for column in columns if column.kind == "text"],  # type: ignore[arg-type]
        column_encoding={
            column.name: _encoding(column, getattr(table, column.name)) for column in columns if column.kind != "text"
        },
        write_page_checksum=True,
        write_statistics=False,
        store_schema=False,
    )
    return sink.getvalue().to_pybytes()


def decode_table(kind: type[T], data: bytes, limit_bytes: int = TABLE_LIMIT_BYTES) -> T:
    """Reads a table from Parquet bytes.

    Columns this version does not know are left out; those the file lacks are filled with their missing value.

    Args:
        kind: The table to read.
        data: What ``encode_table`` wrote, by this version or another.
        limit_bytes: Most bytes the table may take in memory.

    Raises:
        CorruptTableError: The bytes are damaged, of other types than the table's, or claim more than the limit.
    """
    try:
        return _decode(kind, data, limit_bytes)
    except _DAMAGE as error:
        raise CorruptTableError(f"its table {kind.table_name!r} cannot be read ({_one_line(error)})") from error


@dataclass(frozen=True, eq=False)
class Coded:
    """A column of texts without an object for each row.

    Attributes:
        codes: Which of the distinct texts each row holds.
        distinct: The distinct texts, "" for what is missing among them.
    """

    codes: npt.NDArray[np.int32]
    distinct: Texts

    @staticmethod
    def of(texts: Texts) -> Coded:
        """Codes texts."""
        known: dict[str, int] = {}
        codes = np.fromiter((known.setdefault(text, len(known)) for text in texts.tolist()), np.int32, len(texts))
        distinct: Texts = np.empty(len(known), dtype=object)
        distinct[:] = list(known)
        return Coded(codes, distinct)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.codes)

    def __getitem__(self, rows: Any) -> Any:
        """Returns the texts of some rows."""
        return self.distinct[self.codes[rows]]


def decode_columns(kind: type[Table], data: bytes, names: Sequence[str]) -> dict[str, Any]:
    """Reads some columns of a table, for tables that are too large to hold whole.

    Args:
        kind: The table to read.
        data: What ``encode_table`` wrote, by this version or another.
        names: Columns to read.

    Returns:
        The columns by name: numbers as numpy arrays, texts as ``Coded``.

    Raises:
        CorruptTableError: The bytes are damaged, or of other types than the table's.
    """
    try:
        wanted = [column for column in kind.columns() if column.name in names]
        return dict(_read_columns(wanted, data, TABLE_LIMIT_BYTES, _coded))
    except _DAMAGE as error:
        raise CorruptTableError(f"its table {kind.table_name!r} cannot be read ({_one_line(error)})") from error
    finally:
        pa.default_memory_pool().release_unused()  # Arrow would keep what it read the column into


def _to_arrow(column: Column, values: Any) -> pa.Array[Any]:
    kind = _ARROW_TYPES[column.kind]
    if column.kind == "text":
        try:
            return pa.array(values, type=kind, mask=values == "")
        except UnicodeEncodeError:  # a file name that is no valid UTF-8 reaches a stack as lone surrogates
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

    Ids that rise, and operators' ids, which move on from step to step, are small differences. All other whole
    numbers come again in every step, and zstd finds repeats in plain values only. Only the low bytes of a time are
    noise, so its bytes are kept apart.
    """
    if column.kind == "float":
        return "BYTE_STREAM_SPLIT"
    known = values[values != column.missing]
    is_rising = column.kind == "id" and bool(np.all(known[1:] >= known[:-1]))
    return "DELTA_BINARY_PACKED" if is_rising or column.name.endswith("op_id") else "PLAIN"


def _decode(kind: type[T], data: bytes, limit_bytes: int) -> T:
    return kind.of(**dict(_read_columns(kind.columns(), data, limit_bytes, _texts)))


def _read_columns(
    columns: Sequence[Column], data: bytes, limit_bytes: int, read_texts: Callable[[Column, Any], Any]
) -> Iterator[tuple[str, Any]]:
    owned = _owned_by_arrow(data)
    metadata = pq.read_metadata(pa.BufferReader(owned))
    rows = metadata.num_rows
    stored = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    if rows < 0 or stored < 0 or stored + rows * 8 * len(columns) > limit_bytes:
        raise ValueError(f"it claims {rows} rows and {stored} bytes")
    present = set(metadata.schema.to_arrow_schema().names)
    file = pq.ParquetFile(
        pa.BufferReader(owned),
        metadata=metadata,
        read_dictionary=[column.name for column in columns if column.kind == "text" and column.name in present],
        page_checksum_verification=True,
    )
    read = file.read(columns=[column.name for column in columns if column.name in present])
    if read.num_columns and read.num_rows != rows:
        raise ValueError(f"it claims {rows} rows and holds {read.num_rows}")
    for column in columns:
        if column.name not in present:
            empty = np.full(rows, _missing(column), dtype=column.dtype)
            yield column.name, Coded.of(empty) if column.kind == "text" and read_texts is _coded else empty
        elif column.kind == "text":
            yield column.name, read_texts(column, read.column(column.name))
        else:
            whole: Any = read.column(column.name).cast(_ARROW_TYPES[column.kind]).combine_chunks()
            yield column.name, _as_numpy(whole, column.dtype, _missing(column))


def _owned_by_arrow(data: bytes) -> Any:
    """Copies bytes into memory of Arrow's own.

    A thread of Arrow's is the last to let go of what it read, maybe when the process is ending already. Letting go of
    a Python object then would abort it ("terminate called without an active exception").
    """
    owned: Any = pa.allocate_buffer(len(data))  # its stub does not know that numpy can look into it
    np.frombuffer(owned, dtype=np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
    return owned


def _texts(column: Column, values: pa.ChunkedArray[Any]) -> Any:
    """Returns texts as Python strings, one object for each distinct text rather than for each row."""
    coded = _coded(column, values)
    return coded.distinct[coded.codes]


def _coded(column: Column, values: pa.ChunkedArray[Any]) -> Coded:
    if not (pa.types.is_dictionary(values.type) and pa.types.is_string(values.type.value_type)):
        raise ValueError(f"column {column.name!r} holds {values.type}, not text")
    joined: Any = values.unify_dictionaries().combine_chunks()
    distinct: Texts = np.empty(len(joined.dictionary) + 1, dtype=object)
    distinct[:-1] = joined.dictionary.to_pylist()
    distinct[-1] = ""
    return Coded(_as_numpy(joined.indices.cast(pa.int32()), np.int32, len(distinct) - 1), distinct)


def _as_numpy(values: pa.Array[Any], dtype: Any, missing: Any) -> Any:
    """Returns an Arrow array of numbers or booleans as numpy, nulls replaced.

    Straight from its buffers: Arrow's own ``to_numpy`` and ``fill_null`` import pandas, which takes half a second.
    """
    validity, data = values.buffers()
    inside = slice(values.offset, values.offset + len(values))
    if data is None:
        result = np.empty(0, dtype=dtype)
    elif np.dtype(dtype) == np.bool_:
        result = _bits(data)[inside].astype(np.bool_)
    else:
        result = np.frombuffer(memoryview(data), dtype=dtype)[inside]
    if validity is not None and values.null_count:
        result = np.where(_bits(validity)[inside] == 0, np.asarray(missing, dtype=dtype), result)
    return result


def _bits(buffer: pa.Buffer) -> Any:
    return np.unpackbits(np.frombuffer(memoryview(buffer), dtype=np.uint8), bitorder="little")


def _missing(column: Column) -> Any:
    if column.missing is not None:
        return column.missing
    return False if column.kind == "bool" else 0


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
