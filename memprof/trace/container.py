"""The .memprof file: manifests and Parquet tables, a folder for each rank, in one uncompressed zip."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from memprof.errors import BadInputError
from memprof.trace.archive import Archive, damaged, foreign, write_archive
from memprof.trace.columns import Coded, CorruptTableError, decode_columns, decode_table, encode_table
from memprof.trace.manifest import Manifest
from memprof.trace.rank_summary import join_summaries, summarise_rank
from memprof.trace.schema import RANK_TABLES, SCHEMA_VERSION, TABLES, Table
from memprof.version import __version__

T = TypeVar("T", bound=Table)

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRank:
    """One rank of a .memprof file, its tables still unread.

    Attributes:
        archive: The file.
        manifest: The rank's manifest.
        rows: Rows of each table the file holds, by the table's entry in the zip.
        folder: The rank's folder in the zip.
    """

    archive: Archive
    manifest: Manifest
    rows: Mapping[str, int]
    folder: str

    @property
    def path(self) -> Path:
        """The file."""
        return self.archive.path

    @property
    def number(self) -> int:
        """The rank's number in the file, which another file of the same trace may have too."""
        return int(self.folder.removeprefix("rank"))

    def read(self, kind: type[T]) -> T:
        """Reads one table; one the file does not hold has no rows.

        Raises:
            BadInputError: The file is gone, or the table is damaged.
        """
        return _read_table(self.archive, self.rows, kind, _entry_name(self.folder, kind))

    def read_columns(self, kind: type[Table], names: Sequence[str]) -> dict[str, Any]:
        """Reads some columns of one table; texts are coded.

        Raises:
            BadInputError: The file is gone, or the table is damaged.
        """
        name = _entry_name(self.folder, kind)
        if name not in self.rows:
            return columns_of(kind.empty(), names)
        try:
            columns = decode_columns(kind, self.archive.read(name), names)
        except KeyError as error:
            raise damaged(self.path, f"its entry {name!r} is missing") from error
        except CorruptTableError as error:
            raise damaged(self.path, str(error)) from error
        if any(len(values) != self.rows[name] for values in columns.values()):
            raise damaged(self.path, f"its entry {name!r} does not have the rows its manifest tells")
        return columns


@dataclass(frozen=True)
class MemoryRank:
    """One process whose tables are in memory already."""

    manifest: Manifest
    tables: Mapping[type[Table], Table]

    def read(self, kind: type[T], /) -> T:
        """Returns the table; one that is not there has no rows."""
        return cast(T, self.tables[kind]) if kind in self.tables else kind.empty()

    def read_columns(self, kind: type[Table], names: Sequence[str]) -> dict[str, Any]:
        """Returns some columns of a table; texts are coded."""
        return columns_of(self.read(kind), names)


def columns_of(table: Table, names: Sequence[str]) -> dict[str, Any]:
    """Returns some columns of a table in memory as ``read_columns`` does."""
    return {
        column.name: Coded.of(getattr(table, column.name)) if column.kind == "text" else getattr(table, column.name)
        for column in table.columns()
        if column.name in names
    }


@dataclass(frozen=True)
class Container:
    """A .memprof file, its tables still unread.

    Attributes:
        archive: The file.
        ranks: Its ranks, lowest first.
        rows: Rows of each table the file holds, by the table's entry in the zip.
        version: The memprof that wrote it.
    """

    archive: Archive
    ranks: tuple[FileRank, ...]
    rows: Mapping[str, int]
    version: str

    @property
    def is_summed_up(self) -> bool:
        """Whether the file tells its ranks apart by itself; that of one process alone, or an older one, does not."""
        return _entry_name("", RANK_TABLES[0]) in self.rows

    def read(self, kind: type[T]) -> T:
        """Reads one of ``RANK_TABLES``, with the ranks as they are numbered in the file.

        Raises:
            BadInputError: The file is gone, or the table is damaged.
        """
        return _read_table(self.archive, self.rows, kind, _entry_name("", kind))


def write_trace(path: str | Path, ranks: Iterable[tuple[Manifest, Mapping[type[Table], Table]]]) -> None:
    """Writes a trace whole or not at all; the same input gives the same bytes.

    Ranks are taken one at a time, and none is kept once it is written.

    Args:
        path: The .memprof file to write or replace.
        ranks: Manifest and tables of each rank; no two the same rank. Tables left out have no rows.

    Raises:
        OutputError: The disk is full or read-only, the folder is missing ...
    """
    write_archive(Path(path), _entries(ranks))


def read_container(path: Path) -> Container:
    """Reads the manifests of a .memprof file.

    Args:
        path: The file.

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
    return Container(archive, tuple(_read_ranks(archive, numbers, rows)), rows, str(top.get("memprof_version", "")))


def _entries(ranks: Iterable[tuple[Manifest, Mapping[type[Table], Table]]]) -> Iterator[tuple[str, bytes]]:
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
                yield _entry_name(folder, kind), encode_table(tables[kind])
        summaries.append(summarise_rank(manifest, MemoryRank(manifest, tables)))
    if is_of_many or len(numbers) > 1:
        for kind, table in join_summaries(summaries).items():
            rows[_entry_name("", kind)] = len(table)
            yield _entry_name("", kind), encode_table(table)
    top = {
        "schema_version": SCHEMA_VERSION,
        "memprof_version": __version__,
        "ranks": sorted(numbers),
        # Told here, under a checksum, so that a table whose entry is lost is missed.
        "tables": rows,
    }
    yield _MANIFEST, _json_bytes(top)


def _read_table(archive: Archive, rows: Mapping[str, int], kind: type[T], name: str) -> T:
    if name not in rows:
        return kind.empty()
    try:
        table = decode_table(kind, archive.read(name))
    except KeyError as error:
        raise damaged(archive.path, f"its entry {name!r} is missing") from error
    except CorruptTableError as error:
        raise damaged(archive.path, str(error)) from error
    if len(table) != rows[name]:
        raise damaged(archive.path, f"its entry {name!r} does not have the rows its manifest tells")
    return table


def _read_ranks(archive: Archive, numbers: Iterable[int], rows: Mapping[str, int]) -> Iterator[FileRank]:
    path, ordered = archive.path, sorted(set(numbers))
    names = [f"rank{number}/{_MANIFEST}" for number in ordered]
    for number, name in zip(ordered, names, strict=True):
        if name not in archive.entries:
            raise damaged(path, f"the manifest of rank {number} is missing")
    for number, name, content in zip(ordered, names, archive.read_all(names), strict=True):
        try:
            manifest = Manifest.from_json(_read_json(path, name, content))
        except TypeError as error:
            raise damaged(path, f"in the manifest of rank {number}, {error}") from error
        yield FileRank(archive, dataclasses.replace(manifest, rank=number), rows, folder=f"rank{number}")


def _read_json(path: Path, name: str, data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise foreign(path, f"its {name} is no JSON") from error
    if not isinstance(record, dict):
        raise foreign(path, f"its {name} is no JSON object")
    return record


def _check_version(path: Path, top: Mapping[str, Any]) -> None:
    version = top.get("schema_version")
    if type(version) is not int or version < 1:
        raise foreign(path, "its manifest.json tells no schema version")
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
    return (json.dumps(record, indent=1, ensure_ascii=True) + "\n").encode()
