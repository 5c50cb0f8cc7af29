"""The .memprof file: manifests and Parquet tables, one folder per rank, in one uncompressed zip."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from memprof.errors import BadInputError
from memprof.trace.consistency import STEPPED, Checker, InvariantError, checked_with
from memprof.trace.files.archive import Archive, damaged, foreign, write_archive
from memprof.trace.files.coded import ELSEWHERE, Coded
from memprof.trace.files.columns import (
    GROWTH,
    SLACK_BYTES,
    CorruptTableError,
    Elsewhere,
    StoredTable,
    bytes_in_memory,
    decode_table,
    nowhere,
)
from memprof.trace.files.reading import parse_json
from memprof.trace.manifest import Manifest
from memprof.trace.rank_summary import join_summaries, summarise_rank
from memprof.trace.schema import RANK_TABLES, SCHEMA_VERSION, TABLES, Steps, Table
from memprof.units import format_bytes
from memprof.version import __version__

T = TypeVar("T", bound=Table)

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRank:
    """One rank of a .memprof file; tables are read on demand.

    Attributes:
        archive: The file.
        manifest: The rank's manifest.
        rows: Row count of each table in the file, by the table's zip entry.
        folder: The rank's folder in the zip.
    """

    archive: Archive
    manifest: Manifest
    rows: Mapping[str, int]
    folder: str

    @functools.cached_property
    def checker(self) -> Checker:
        """Checks the data read from the rank."""
        return Checker(self.rows_of, functools.cache(lambda: self.read_columns(Steps, ("step",))["step"]))

    @functools.cached_property
    def limit_bytes(self) -> int:
        """Memory limit in bytes of one of its tables."""
        return _limit(self.archive, self.folder)

    def rows_of(self, kind: type[Table]) -> int:
        """Returns the row count of one of its tables."""
        return self.rows.get(_entry_name(self.folder, kind), 0)

    @property
    def number(self) -> int:
        """The rank's number in the file; another file of the same trace may use it too."""
        return int(self.folder.removeprefix("rank"))

    def read(self, kind: type[T]) -> T:
        """Reads one table; a table missing from the file has no rows.

        Raises:
            BadInputError: The file is gone, or the table is damaged; for large tables also on first use of a column.
        """
        name = _entry_name(self.folder, kind)
        if kind in STEPPED:
            self.checker.step_numbers()  # now: the file may be replaced before they are used
        return _table(self.archive, kind, name, self._stored(kind, name)) if name in self.rows else kind.empty()

    def read_columns(self, kind: type[Table], names: Sequence[str]) -> dict[str, Any]:
        """Reads some columns of one table; texts as ``Coded``.

        Raises:
            BadInputError: The file is gone, or the table is damaged.
        """
        name = _entry_name(self.folder, kind)
        if name not in self.rows:
            return columns_of(kind.empty(), names)
        with _sentences(self.archive, name):
            return self._stored(kind, name).read(names)

    def _stored(self, kind: type[Table], name: str) -> StoredTable:
        elsewhere = functools.partial(self._elsewhere, kind)
        return _stored(self.archive, self.rows, kind, name, self.checker, self.limit_bytes, elsewhere)

    def _elsewhere(self, kind: type[Table], sources: Mapping[str, str]) -> Callable[[str], Any]:
        """Opens columns that are stored in other tables.

        Args:
            kind: The table that the columns belong to.
            sources: The stored ``table.column`` of each column by its name.
        """
        opened: dict[type[Table], StoredTable] = {}
        columns: dict[str, tuple[StoredTable, str]] = {}
        for name, source in sources.items():
            table, column = ELSEWHERE.get((kind, name), (None, ""))
            if table is None or source != f"{table.table_name}.{column}":
                raise ValueError(f"its column {name!r} cannot equal {source!r:.60}")
            if self.rows_of(table) != self.rows_of(kind):
                raise ValueError(f"table {table.table_name!r} has another number of rows")
            if table not in opened:
                opened[table] = self._stored(table, _entry_name(self.folder, table))
            columns[name] = opened[table], column

        def read(name: str) -> Any:
            stored, column = columns[name]
            return stored.read([column])[column]

        return read


@dataclass(frozen=True)
class MemoryRank:
    """One process whose tables are already in memory."""

    manifest: Manifest
    tables: Mapping[type[Table], Table]

    def read(self, kind: type[T], /) -> T:
        """Returns the table; a missing table has no rows."""
        return cast(T, self.tables[kind]) if kind in self.tables else kind.empty()

    def read_columns(self, kind: type[Table], names: Sequence[str]) -> dict[str, Any]:
        """Returns some columns of a table; texts as ``Coded``."""
        return columns_of(self.read(kind), names)


def columns_of(table: Table, names: Sequence[str]) -> dict[str, Any]:
    """Returns some columns of a table in memory, as ``read_columns`` does."""
    return {
        column.name: Coded.of(getattr(table, column.name)) if column.kind == "text" else getattr(table, column.name)
        for column in table.columns()
        if column.name in names
    }


@dataclass(frozen=True)
class Container:
    """A .memprof file; tables are read on demand.

    Attributes:
        archive: The file.
        ranks: Its ranks, lowest first.
        rows: Row count of each table in the file, by the table's zip entry.
        version: The memprof version that wrote it.
    """

    archive: Archive
    ranks: tuple[FileRank, ...]
    rows: Mapping[str, int]
    version: str

    @property
    def is_summed_up(self) -> bool:
        """Whether the file has rank summaries; files of a single process and older files do not."""
        return _entry_name("", RANK_TABLES[0]) in self.rows

    def read(self, kind: type[T]) -> T:
        """Reads one of ``RANK_TABLES``, with ranks numbered as in the file.

        Raises:
            BadInputError: The file is gone, or the table is damaged.
        """
        name, checker = _entry_name("", kind), Checker(lambda kind: 0, tuple)
        if name not in self.rows:
            return kind.empty()
        stored = _stored(self.archive, self.rows, kind, name, checker, _limit(self.archive, ""), nowhere)
        return _table(self.archive, kind, name, stored)


def write_trace(path: str | Path, ranks: Iterable[tuple[Manifest, Mapping[type[Table], Table]]]) -> None:
    """Writes a trace atomically; the same input gives the same bytes.

    Ranks are consumed one at a time, and none is kept in memory once written.

    Args:
        path: The .memprof file to write or replace.
        ranks: Manifest and tables of each rank; no two the same rank. Omitted tables have no rows.

    Raises:
        OutputError: The disk is full or read-only, the folder is missing ...
    """
    write_archive(Path(path), _entries(ranks))


def read_container(path: Path) -> Container:
    """Reads the manifests of a .memprof file.

    Raises:
        BadInputError: The file is missing, empty, cut short, damaged, foreign or of a newer schema.
    """
    archive = Archive.open(path)
    try:
        top = _read_json(path, _MANIFEST, archive.read(_MANIFEST))
    except KeyError as error:
        raise foreign(path, "it is a zip without a manifest.json") from error
    _check_version(path, top)
    numbers, rows = top.get("ranks"), top.get("tables")
    if not _are_counts(numbers) or not isinstance(rows, dict) or not _are_counts(list(rows.values())):
        raise foreign(path, "its manifest.json lists no ranks and tables")
    if not numbers:
        raise BadInputError(f"{path} holds no recorded process.")
    _check_size(archive, "", rows)
    return Container(archive, tuple(_read_ranks(archive, numbers, rows)), rows, str(top.get("memprof_version", "")))


def _entries(ranks: Iterable[tuple[Manifest, Mapping[type[Table], Table]]]) -> Iterator[tuple[str, bytes]]:
    from memprof.trace.files.packing import pack_table  # most commands only read

    numbers: list[int] = []
    summaries: list[Mapping[type[Table], Table]] = []
    rows: dict[str, int] = {}
    is_of_many = False
    for manifest, tables in ranks:
        numbers.append(manifest.rank)
        is_of_many |= manifest.world_size > 1
        folder = f"rank{manifest.rank}"
        written = dataclasses.replace(manifest, schema_version=SCHEMA_VERSION)
        yield f"{folder}/{_MANIFEST}", _json_bytes(written.to_json())
        for kind in TABLES:
            if kind in tables and len(tables[kind]):
                rows[_entry_name(folder, kind)] = len(tables[kind])
                yield _entry_name(folder, kind), pack_table(tables[kind], tables)
        summaries.append(summarise_rank(manifest, MemoryRank(manifest, tables)))
    if is_of_many or len(numbers) > 1:
        for kind, table in join_summaries(summaries).items():
            rows[_entry_name("", kind)] = len(table)
            yield _entry_name("", kind), pack_table(table, {})
    top = {
        "schema_version": SCHEMA_VERSION,
        "memprof_version": __version__,
        "ranks": sorted(numbers),
        # Recorded here, under a checksum, so that a lost table entry is detected.
        "tables": rows,
    }
    yield _MANIFEST, _json_bytes(top)


def _stored(
    archive: Archive,
    rows: Mapping[str, int],
    kind: type[Table],
    name: str,
    checker: Checker,
    limit_bytes: int,
    elsewhere: Elsewhere,
) -> StoredTable:
    check = functools.partial(checker.check, kind)
    with _sentences(archive, name):
        data = archive.read(name)
        return StoredTable(kind, data, limit_bytes, rows=rows[name], check=check, elsewhere=elsewhere)


def _table(archive: Archive, kind: type[T], name: str, stored: StoredTable) -> T:
    together, sentences = functools.partial(checked_with, kind), functools.partial(_sentences, archive, name)
    return decode_table(kind, stored, together, sentences)


@contextmanager
def _sentences(archive: Archive, name: str) -> Iterator[None]:
    """Returns the error message for an invalid table."""
    try:
        yield
    except KeyError as error:
        raise damaged(archive.path, f"its entry {name!r} is missing") from error
    except (CorruptTableError, InvariantError) as error:
        raise damaged(archive.path, str(error)) from error


def _check_size(archive: Archive, folder: str, rows: Mapping[str, int]) -> None:
    """Rejects a rank whose tables would take far more memory than their size in the file justifies."""
    names = _names(folder)
    claimed = sum(bytes_in_memory(kind, rows[name]) for name, kind in names.items() if name in rows)
    if claimed > _limit(archive, folder):
        raise damaged(
            archive.path, f"its tables claim {format_bytes(claimed)} of memory, which no recording of its size does"
        )


def _limit(archive: Archive, folder: str) -> int:
    stored = sum(archive.entries[name].file_size for name in _names(folder) if name in archive.entries)
    return SLACK_BYTES + GROWTH * stored


def _names(folder: str) -> dict[str, type[Table]]:
    return {_entry_name(folder, kind): kind for kind in (TABLES if folder else RANK_TABLES)}


def _read_ranks(archive: Archive, numbers: Iterable[int], rows: Mapping[str, int]) -> Iterator[FileRank]:
    path, ordered = archive.path, sorted(set(numbers))
    names = [f"rank{number}/{_MANIFEST}" for number in ordered]
    for number, name in zip(ordered, names, strict=True):
        if name not in archive.entries:
            raise damaged(path, f"the manifest of rank {number} is missing")
    for number, name, content in zip(ordered, names, archive.read_all(names), strict=True):
        try:
            record = _read_json(path, name, content)
            manifest = Manifest.from_json(record)
        except TypeError as error:
            raise damaged(path, f"in the manifest of rank {number}, {error}") from error
        if not record.keys() & manifest.to_json().keys():
            raise damaged(path, f"the manifest of rank {number} has no known key")
        _check_size(archive, f"rank{number}", rows)
        yield FileRank(archive, dataclasses.replace(manifest, rank=number), rows, folder=f"rank{number}")


def _read_json(path: Path, name: str, data: bytes) -> dict[str, Any]:
    try:
        record = parse_json(data, strict=False)
    except ValueError as error:
        raise foreign(path, f"its {name} is not JSON") from error
    if not isinstance(record, dict):
        raise foreign(path, f"its {name} is not a JSON object")
    return record


def _check_version(path: Path, top: Mapping[str, Any]) -> None:
    version = top.get("schema_version")
    if type(version) is not int or version < 1:
        raise foreign(path, "its manifest.json has no schema version")
    if version > SCHEMA_VERSION:
        raise BadInputError(
            f"{path} was written by memprof {top.get('memprof_version', 'of a later version')} with trace schema "
            f"{version}; this is memprof {__version__}, which reads schemas up to {SCHEMA_VERSION}: upgrade memprof."
        )


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _entry_name(folder: str, kind: type[Table]) -> str:
    return f"{folder}/{kind.table_name}.parquet" if folder else f"{kind.table_name}.parquet"


def _json_bytes(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, separators=(",", ":"), ensure_ascii=True) + "\n").encode()
