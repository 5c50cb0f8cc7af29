"""Decodes one table from Parquet bytes, which may be damaged or hostile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memprof.trace.files.coded import Coded, Codings
from memprof.trace.files.packing import as_numpy, as_type, constant_column, missing, restored
from memprof.trace.files.parquet import unpacked_bytes
from memprof.trace.schema import Column, Table, Texts
from memprof.units import format_bytes

T = TypeVar("T", bound=Table)

#: Memory limit of a table, as a multiple of its bytes in the file plus a constant: about five times what tables of
#: real recordings take, and far below what a few kilobytes of run-length encoded Parquet can claim.
GROWTH = 256
SLACK_BYTES = 192 << 20
#: Column limit of a table, far above any version's.
_MOST_COLUMNS = 1_000


class CorruptTableError(Exception):
    """The bytes are not a valid table; the caller adds the file to the message."""


#: Exceptions raised when reading damaged or hostile Parquet.
_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError)


#: Checks the columns of a table before they are used.
Check = Callable[[Mapping[str, Any]], None]

#: Returns columns that equal ones of other tables, by their names: given the stored ``table.column`` of each.
Elsewhere = Callable[[Mapping[str, str]], Mapping[str, Any]]


def nowhere(sources: Mapping[str, str]) -> Mapping[str, Any]:
    """Rejects columns of other tables, where there are none.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"its column {next(iter(sources))!r} is in another table")


def bytes_in_memory(kind: type[Table], rows: int) -> int:
    """Returns the memory that a table of this many rows takes, excluding its distinct texts."""
    return rows * sum(1 if column.kind == "bool" else 8 for column in kind.columns())


def decode_table(
    kind: type[T],
    data: bytes,
    limit_bytes: int | None = None,
    *,
    rows: int | None = None,
    check: Check = lambda columns: None,
    elsewhere: Elsewhere = nowhere,
) -> T:
    """Reads a table from Parquet bytes.

    Columns unknown to this version are dropped; those missing from the file are filled with their missing value.

    Args:
        kind: The table to read.
        data: Output of ``pack_table`` or ``encode_table`` of this or another version.
        limit_bytes: Memory limit of the table in bytes; derived from the size of ``data`` where left out.
        rows: Required row count; any where left out.
        check: Checks the columns, texts as ``Coded``; raises on invalid data.
        elsewhere: Reads columns that the file stores in other tables.

    Raises:
        CorruptTableError: The bytes are damaged, have the wrong types for the table, or claim more than the limit.
    """
    try:
        columns = _read_columns(kind.columns(), data, limit_bytes, rows, elsewhere)
        check(columns)
        return kind.of(
            **{
                name: values.distinct[values.codes] if isinstance(values, Coded) else values
                for name, values in columns.items()
            }
        )
    except _DAMAGE as error:
        raise CorruptTableError(f"its table {kind.table_name!r} cannot be read ({_one_line(error)})") from error
    finally:
        pa.default_memory_pool().release_unused()  # Arrow would keep the buffers it read the columns into


def decode_columns(
    kind: type[Table],
    data: bytes,
    names: Sequence[str],
    *,
    limit_bytes: int | None = None,
    rows: int | None = None,
    check: Check = lambda columns: None,
    elsewhere: Elsewhere = nowhere,
) -> dict[str, Any]:
    """Reads some columns of a table, for tables too large to hold in memory.

    Args:
        kind: The table to read.
        data: Output of ``pack_table`` or ``encode_table`` of this or another version.
        names: Columns to read.
        limit_bytes: Memory limit of the columns in bytes; derived from the size of ``data`` where left out.
        rows: Required row count; any where left out.
        check: As in ``decode_table``.
        elsewhere: As in ``decode_table``.

    Returns:
        The columns by name: numbers as numpy arrays, texts as ``Coded``.

    Raises:
        CorruptTableError: The bytes are damaged, or have the wrong types for the table.
    """
    try:
        wanted = [column for column in kind.columns() if column.name in names]
        columns = _read_columns(wanted, data, limit_bytes, rows, elsewhere)
        check(columns)
        return columns
    except _DAMAGE as error:
        raise CorruptTableError(f"its table {kind.table_name!r} cannot be read ({_one_line(error)})") from error
    finally:
        pa.default_memory_pool().release_unused()  # Arrow would keep the buffer it read the column into


def _read_columns(
    columns: Sequence[Column], data: bytes, limit_bytes: int | None, expected: int | None, elsewhere: Elsewhere
) -> dict[str, Any]:
    owned = _owned_by_arrow(data)
    metadata = pq.read_metadata(pa.BufferReader(owned))
    rows = metadata.num_rows
    if expected is not None and rows != expected:
        raise ValueError("its row count differs from the manifest")
    _check_claims(
        metadata, data, len(columns), SLACK_BYTES + GROWTH * len(data) if limit_bytes is None else limit_bytes
    )
    codings = Codings.of(metadata.schema.to_arrow_schema().names, metadata.metadata)
    file = pq.ParquetFile(
        pa.BufferReader(owned),
        metadata=metadata,
        read_dictionary=[column.name for column in columns if column.kind == "text" and column.name in codings.stored],
        page_checksum_verification=True,
    )
    stored = dict.fromkeys(name for column in columns for name in codings.stored_names(column.name))
    read = file.read(columns=list(stored))
    if read.num_columns and read.num_rows != rows:
        raise ValueError(f"it claims {rows} rows and holds {read.num_rows}")
    sources = {column.name: source for column in columns if "." in (source := codings.source(column.name))}
    moved = elsewhere(sources) if sources else {}
    result = {}
    for column in columns:
        name = column.name
        if name in moved:
            result[name] = moved[name]
        elif name in codings.same and (column.kind == "text" or codings.source(name) not in codings.stored):
            raise ValueError(f"column {name!r} cannot equal {codings.source(name)!r:.60}")
        elif column.kind == "text":
            if name in codings.stored:
                result[name] = _coded(column, read.column(name))
            else:
                result[name] = _one_text(codings.constant.get(name, ""), rows)
        elif codings.source(name) in codings.stored:
            result[name] = restored(column, codings, read)
        else:
            result[name] = constant_column(column, codings.constant.get(name, missing(column)), rows)
    return result


def _check_claims(metadata: Any, data: bytes, columns: int, limit_bytes: int) -> None:
    """Rejects data that would unpack to more memory than its size justifies, before unpacking any of it.

    Raises:
        ValueError: It claims too much, or contradicts itself.
    """
    rows = metadata.num_rows
    if metadata.num_columns > _MOST_COLUMNS:
        raise ValueError(f"it has {metadata.num_columns:,} columns")
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    if rows < 0 or sum(group.num_rows for group in groups) != rows or any(group.num_rows < 0 for group in groups):
        raise ValueError("its parts do not have the rows it claims")
    if rows * 8 * columns > limit_bytes:
        raise ValueError(f"it claims {rows} rows in {format_bytes(len(data))}")
    unpacked = unpacked_bytes(data)
    if rows * 8 * columns + unpacked > limit_bytes:
        raise ValueError(f"it unpacks from {format_bytes(len(data))} to {format_bytes(unpacked)}")


def _one_text(text: Any, rows: int) -> Coded:
    """Returns a text column of which every row has the same text.

    Raises:
        ValueError: It is not a text.
    """
    if not isinstance(text, str):
        raise ValueError("a constant of its texts is not a text")
    distinct: Texts = np.array([text], dtype=object)
    return Coded(np.zeros(rows, dtype=np.int32), distinct)


def _owned_by_arrow(data: bytes) -> Any:
    """Copies bytes into memory owned by Arrow.

    An Arrow thread releases its input last, possibly while the process is exiting. Releasing a Python object at that
    point would abort the process ("terminate called without an active exception").
    """
    owned: Any = pa.allocate_buffer(len(data))  # its stub omits the buffer protocol, which numpy uses
    np.frombuffer(owned, dtype=np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
    return owned


def _coded(column: Column, values: pa.ChunkedArray[Any]) -> Coded:
    if not (pa.types.is_dictionary(values.type) and pa.types.is_string(values.type.value_type)):
        raise ValueError(f"column {column.name!r} holds {values.type}, not text")
    joined: Any = values.unify_dictionaries().combine_chunks()
    distinct: Texts = np.empty(len(joined.dictionary) + 1, dtype=object)
    distinct[:-1] = joined.dictionary.to_pylist()
    distinct[-1] = ""
    return Coded(as_numpy(as_type(joined.indices, pa.int32()), np.int32, len(distinct) - 1), distinct)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
