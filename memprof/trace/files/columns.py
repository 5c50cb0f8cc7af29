"""Decodes one table from Parquet bytes, which may be damaged or hostile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memprof.trace.files.coded import Coded, Codings
from memprof.trace.files.packing import as_numpy, as_type, constant_column, missing, restored
from memprof.trace.files.parquet import unpacked_bytes
from memprof.trace.schema import Column, StoredPart, Table, Texts
from memprof.units import format_bytes

T = TypeVar("T", bound=Table)

#: Memory limit of a table, as a multiple of its bytes in the file plus a constant: about five times what tables of
#: real recordings take, and far below what a few kilobytes of run-length encoded Parquet can claim.
GROWTH = 256
SLACK_BYTES = 192 << 20
#: Rows of a table whose columns are read at once, which is faster than one by one.
AT_ONCE = 1 << 16
#: Column limit of a table, far above any version's.
_MOST_COLUMNS = 1_000


class CorruptTableError(Exception):
    """The bytes are not a valid table; the caller adds the file to the message."""


#: Exceptions raised when reading damaged or hostile Parquet.
_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError)


#: Checks the columns of a table before they are used.
Check = Callable[[Mapping[str, Any]], None]

#: Opens columns that equal ones of other tables, given the stored ``table.column`` of each by name; returns what reads
#: one by its name.
Elsewhere = Callable[[Mapping[str, str]], Callable[[str], Any]]


def nowhere(sources: Mapping[str, str]) -> Callable[[str], Any]:
    """Rejects columns of other tables, where there are none.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"its column {next(iter(sources))!r} is in another table")


def bytes_in_memory(kind: type[Table], rows: int) -> int:
    """Returns the memory that a table of this many rows takes, excluding its distinct texts."""
    return rows * sum(1 if column.kind == "bool" else 8 for column in kind.columns())


class StoredTable:
    """A table as Parquet bytes, whose columns are read on demand, in one thread at a time."""

    def __init__(
        self,
        kind: type[Table],
        data: bytes,
        limit_bytes: int | None = None,
        *,
        rows: int | None = None,
        check: Check = lambda columns: None,
        elsewhere: Elsewhere = nowhere,
    ) -> None:
        """Reads what the bytes say that they hold.

        Columns unknown to this version are dropped; those missing from the file are filled with their missing value.

        Args:
            kind: The table to read.
            data: Output of ``pack_table`` or ``encode_table`` of this or another version.
            limit_bytes: Memory limit of what is read at once; derived from the size of ``data`` where left out.
            rows: Required row count; any where left out.
            check: Checks the columns, texts as ``Coded``; raises on invalid data.
            elsewhere: Opens columns that the file stores in other tables.

        Raises:
            CorruptTableError: The bytes are damaged, or claim more than the limit.
        """
        self._kind, self._check = kind, check
        self._packed_bytes = len(data)
        self._limit_bytes = SLACK_BYTES + GROWTH * len(data) if limit_bytes is None else limit_bytes
        with self._reading():
            owned = _owned_by_arrow(data)
            metadata = pq.read_metadata(pa.BufferReader(owned))
            self.rows: int = metadata.num_rows
            if rows is not None and self.rows != rows:
                raise ValueError("its row count differs from the manifest")
            _check_parts(metadata)
            self._unpacked_bytes = 0
            self._check_limit(1)
            self._unpacked_bytes = unpacked_bytes(data)
            self._codings = Codings.of(metadata.schema.to_arrow_schema().names, metadata.metadata)
            sources = {column.name: self._codings.source(column.name) for column in kind.columns()}
            self._moved = {name: source for name, source in sources.items() if "." in source}
            self._read_moved = elsewhere(self._moved) if self._moved else None  # now: the file may be replaced
            texts = [column.name for column in kind.columns() if column.kind == "text"]
            self._file = pq.ParquetFile(
                pa.BufferReader(owned),
                metadata=metadata,
                read_dictionary=[name for name in texts if name in self._codings.stored],
                page_checksum_verification=True,
            )

    def read(self, names: Collection[str], known: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Reads some columns.

        Args:
            names: Their names.
            known: Columns that were read before; those that equal one share its memory.

        Returns:
            The columns by name: numbers as numpy arrays, texts as ``Coded``.

        Raises:
            CorruptTableError: They are damaged, have the wrong types for the table, or claim more than the limit.
        """
        with self._reading():
            columns = self._columns([column for column in self._kind.columns() if column.name in names], known)
            self._check(columns)
            return columns

    def check_limit(self, columns: int) -> None:
        """Rejects bytes of which some columns would take more memory than their size justifies.

        Raises:
            CorruptTableError: They claim too much.
        """
        with self._reading():
            self._check_limit(columns)

    def _check_limit(self, columns: int) -> None:
        packed, memory = format_bytes(self._packed_bytes), self.rows * 8 * columns
        if memory > self._limit_bytes:
            raise ValueError(f"it claims {self.rows} rows in {packed}")
        if memory + self._unpacked_bytes > self._limit_bytes:
            raise ValueError(f"it unpacks from {packed} to {format_bytes(self._unpacked_bytes)}")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            name = self._kind.table_name
            raise CorruptTableError(f"its table {name!r} cannot be read ({_one_line(error)})") from error
        finally:
            pa.default_memory_pool().release_unused()  # Arrow would keep the buffers it read the columns into

    def _columns(self, columns: Sequence[Column], known: Mapping[str, Any]) -> dict[str, Any]:
        self._check_limit(len(columns))
        codings, rows = self._codings, self.rows
        kinds = {column.name: column.kind for column in self._kind.columns()}
        sources = {column.name: codings.source(column.name) for column in columns}
        read_before = {(codings.source(name), kinds[name]): values for name, values in known.items()}
        same = {
            name: read_before[one, kinds[name]] for name, one in sources.items() if (one, kinds[name]) in read_before
        }
        stored = dict.fromkeys(part for name in sources if name not in same for part in codings.stored_names(name))
        read = self._file.read(columns=list(stored))
        if read.num_columns and read.num_rows != rows:
            raise ValueError(f"it claims {rows} rows and holds {read.num_rows}")
        result = {}
        for column in columns:
            name = column.name
            if self._read_moved and name in self._moved:
                result[name] = self._read_moved(name)
            elif name in codings.same and (column.kind == "text" or codings.source(name) not in codings.stored):
                raise ValueError(f"column {name!r} cannot equal {codings.source(name)!r:.60}")
            elif name in same:
                result[name] = same[name]
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


class _Columns(dict[str, Any]):
    """Columns of a table, which are dropped with it: steps that were cut out of it are kept longer."""


def decode_table(
    kind: type[T],
    stored: StoredTable,
    together: Callable[[str], Collection[str]] = lambda name: (name,),
    sentences: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> T:
    """Returns a table: read at once if it is small, else column by column on first use, in any thread.

    Args:
        kind: The table.
        stored: Its bytes.
        together: Names of the columns that are checked with one, itself included.
        sentences: What errors of reading pass through.

    Raises:
        CorruptTableError: As ``StoredTable.read``, now or on first use of a column.
    """
    columns = _Columns()
    kept = weakref.ref(columns)
    lock = threading.RLock()  # Arrow reads a file in one thread at a time

    def read(name: str) -> Any:
        with lock:
            known = kept()
            known = _Columns() if known is None else known  # None where only parts of the table are left
            if name not in known:
                with sentences():
                    found = stored.read(together(name), known)
                known.update({each: one.narrow() if isinstance(one, Coded) else one for each, one in found.items()})
            return known[name]

    names = [column.name for column in kind.columns()]
    with sentences():
        if stored.rows <= AT_ONCE:
            columns.update(stored.read(names))
        else:
            stored.check_limit(len(names))
    return kind.stored(StoredPart(read, stored.rows, kept=columns))


def _check_parts(metadata: Any) -> None:
    """Rejects a footer that contradicts itself.

    Raises:
        ValueError: It does.
    """
    rows = metadata.num_rows
    if metadata.num_columns > _MOST_COLUMNS:
        raise ValueError(f"it has {metadata.num_columns:,} columns")
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    if rows < 0 or sum(group.num_rows for group in groups) != rows or any(group.num_rows < 0 for group in groups):
        raise ValueError("its parts do not have the rows it claims")


def _one_text(text: Any, rows: int) -> Coded:
    """Returns a text column of which every row has the same text.

    Raises:
        ValueError: It is not a text.
    """
    if not isinstance(text, str):
        raise ValueError("a constant of its texts is not a text")
    distinct: Texts = np.array([text], dtype=object)
    return Coded(np.broadcast_to(np.int32(0), rows), distinct)


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
