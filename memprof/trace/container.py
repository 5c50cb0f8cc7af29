"""The .memprof file: manifests and Parquet tables, a folder for each rank, in one uncompressed zip."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memprof.errors import BadInputError
from memprof.trace.archive import damaged, foreign, read_entry, write_archive
from memprof.trace.columns import Coded, CorruptTableError, decode_columns, decode_table, encode_table
from memprof.trace.manifest import Manifest
from memprof.trace.schema import SCHEMA_VERSION, TABLES, Table
from memprof.version import __version__

T = TypeVar("T", bound=Table)

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRank:
    """One rank of a .memprof file, its tables still unread.

    Attributes:
        path: The file.
        manifest: The rank's manifest.
        rows: Rows of each table the file holds, by the table's entry in the zip.
        folder: The rank's folder in the zip.
    """

    path: Path
    manifest: Manifest
    rows: Mapping[str, int]
    folder: str

    def read(self, kind: type[T]) -> T:
        """Reads one table; one the file does not hold has no rows.

        Raises:
            BadInputError: The file is gone, or the table is damaged.
        """
        name = _entry_name(self.folder, kind)
        if name not in self.rows:
            return kind.empty()
        try:
            table = decode_table(kind, read_entry(self.path, name))
        except KeyError as error:
            raise damaged(self.path, f"its entry {name!r} is missing") from error
        except CorruptTableError as error:
            raise damaged(self.path, str(error)) from error
        if len(table) != self.rows[name]:
            raise damaged(self.path, f"its entry {name!r} does not have the rows its manifest tells")
        return table

    def read_columns(self, kind: type[Table], names: Sequence[str]) -> dict[str, Any]:
        """Reads some columns of one table; texts are coded.

        Raises:
            BadInputError: The file is gone, or the table is damaged.
        """
        name = _entry_name(self.folder, kind)
        if name not in self.rows:
            return columns_of(kind.empty(), names)
        try:
            columns = decode_columns(kind, read_entry(self.path, name), names)
        except KeyError as error:
            raise damaged(self.path, f"its entry {name!r} is missing") from error
        except CorruptTableError as error:
            raise damaged(self.path, str(error)) from error
        if any(len(values) != self.rows[name] for values in columns.values()):
            raise damaged(self.path, f"its entry {name!r} does not have the rows its manifest tells")
        return columns


def columns_of(table: Table, names: Sequence[str]) -> dict[str, Any]:
    """Returns some columns of a table in memory as ``read_columns`` does."""
    return {
        column.name: Coded.of(getattr(table, column.name)) if column.kind == "text" else getattr(table, column.name)
        for column in table.columns()
        if column.name in names
    }


def write_trace(path: str | Path, ranks: Sequence[tuple[Manifest, Mapping[type[Table], Table]]]) -> None:
    """Writes a trace whole or not at all; the same input gives the same bytes.

    Args:
        path: The .memprof file to write or replace.
        ranks: Manifest and tables of each rank; no two the same rank. Tables left out have no rows.

    Raises:
        OSError: The disk is full or read-only, the folder is missing ...
    """
    write_archive(Path(path), _entries(ranks))


def read_container(path: Path) -> list[FileRank]:
    """Reads the manifests of a .memprof file.

    Args:
        path: The file.

    Returns:
        Its ranks, lowest first.

    Raises:
        BadInputError: The file is missing, empty, cut short, damaged, foreign or of a newer schema.
    """
    try:
        top = _read_json(path, _MANIFEST)
    except KeyError as error:
        raise foreign(path, "it is a zip without a manifest.json") from error
    _check_version(path, top)
    numbers, rows = top.get("ranks"), top.get("tables")
    if not _are_counts(numbers) or not isinstance(rows, dict) or not _are_counts(list(rows.values())):
        raise foreign(path, "its manifest.json lists no ranks and tables")
    if not numbers:
        raise BadInputError(f"{path} holds no recorded process.")
    return [_read_rank(path, number, rows) for number in sorted(set(numbers))]


def _entries(ranks: Sequence[tuple[Manifest, Mapping[type[Table], Table]]]) -> Iterator[tuple[str, bytes]]:
    folders = [f"rank{manifest.rank}" for manifest, _ in ranks]
    held = [
        (folder, kind, tables[kind])
        for folder, (_, tables) in zip(folders, ranks, strict=True)
        for kind in TABLES
        if kind in tables and len(tables[kind])
    ]
    top = {
        "schema_version": SCHEMA_VERSION,
        "memprof_version": __version__,
        "ranks": sorted(manifest.rank for manifest, _ in ranks),
        # Told here, under a checksum, so that a table whose entry is lost is missed.
        "tables": {_entry_name(folder, kind): len(table) for folder, kind, table in held},
    }
    yield _MANIFEST, _json_bytes(top)
    for folder, (manifest, _) in zip(folders, ranks, strict=True):
        written = dataclasses.replace(manifest, schema_version=SCHEMA_VERSION)
        yield f"{folder}/{_MANIFEST}", _json_bytes(written.to_json())
    for folder, kind, table in held:
        yield _entry_name(folder, kind), encode_table(table)


def _read_rank(path: Path, number: int, rows: Mapping[str, int]) -> FileRank:
    folder = f"rank{number}"
    try:
        manifest = Manifest.from_json(_read_json(path, f"{folder}/{_MANIFEST}"))
    except KeyError as error:
        raise damaged(path, f"the manifest of rank {number} is missing") from error
    except TypeError as error:
        raise damaged(path, f"in the manifest of rank {number}, {error}") from error
    return FileRank(path=path, manifest=dataclasses.replace(manifest, rank=number), rows=rows, folder=folder)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    data = read_entry(path, name)
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
    return f"{folder}/{kind.table_name}.parquet"


def _json_bytes(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1, ensure_ascii=True) + "\n").encode()
