"""Recordings with something wrong in them: valid tables of a small job, and corruptions of each kind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from memprof.trace.files.archive import write_archive
from memprof.trace.files.packing import pack_table
from memprof.trace.manifest import Manifest
from memprof.trace.schema import TABLES, Column, Table

Columns = dict[str, Any]
Tables = dict[type[Table], Table]

#: Whole numbers that are wrong somewhere: below, just behind the end of small tables, and at the edges of types.
NUMBERS = (-2, -1, 0, 1, 3, 7, 50, 912, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1, -(2**31), -(2**63))
FRACTIONS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-300, 1e18, 1e300)
TEXTS = (
    "",
    "nobody",
    "forward",
    "x" * 5000,
    "two\nlines",
    "\x1b]0;title\x07\x1b[2J",
    "\0",
    "é漢",
    "a:b:c",
    "cuda:x",
    "cuda:99999999999",
    "-1x5",
    "9" * 400,
    "{",
    "../..",
    "%s{0}",
)


class Base:
    """A valid recording, each table encoded once; a case encodes the ones it changes."""

    def __init__(self, manifest: Manifest, tables: Tables) -> None:
        self.manifest = manifest.to_json()
        self.tables = {kind: table for kind, table in tables.items() if len(table)}
        self._encoded = {kind: pack_table(table, self.tables) for kind, table in self.tables.items()}

    def write(self, path: Path, changed: dict[type[Table], bytes | None], manifest: dict[str, Any], **top: Any) -> None:
        """Writes the recording with some tables replaced or, by None, left out; all checksums fit."""
        entries, rows = [("rank0/manifest.json", json.dumps(manifest).encode())], {}
        for kind in TABLES:
            data = changed.get(kind, self._encoded.get(kind))
            if data is None:
                continue
            name = f"rank0/{kind.table_name}.parquet"
            entries.append((name, data))
            rows[name] = _rows(data)
        whole = {"schema_version": 1, "memprof_version": "0", "ranks": [0], "tables": rows, **top}
        write_archive(path, [*entries, ("manifest.json", json.dumps(whole).encode())])


def _rows(data: bytes) -> int:
    try:
        return int(pq.read_metadata(pa.BufferReader(data)).num_rows)
    except (pa.ArrowException, OSError, ValueError):
        return 1


def columns_of(table: Table) -> Columns:
    return {column.name: getattr(table, column.name).copy() for column in table.columns()}


def encoded(columns: Columns, draw: random.Random) -> bytes:
    """Writes columns as Parquet in one of the ways that other tools do."""
    arrays = {}
    for name, values in columns.items():
        arrays[name] = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values.tolist())
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table(arrays),
        sink,
        compression=draw.choice(["zstd", "none", "snappy"]),
        use_dictionary=draw.random() < 0.5,
        row_group_size=draw.choice([1, 3, 1000]),
    )
    return sink.getvalue().to_pybytes()


def wrong_value(column: Column, draw: random.Random) -> Any:
    if column.kind == "text":
        return draw.choice((*TEXTS, *column.values))
    return draw.choice({"float": FRACTIONS, "bool": (True, False)}.get(column.kind, NUMBERS))


def _column(kind: type[Table], draw: random.Random) -> Column:
    return draw.choice(kind.columns())


def change_cell(kind: type[Table], columns: Columns, draw: random.Random) -> None:
    """One value is another."""
    column = _column(kind, draw)
    values = columns[column.name]
    values[draw.randrange(len(values))] = wrong_value(column, draw)


def change_cells(kind: type[Table], columns: Columns, draw: random.Random) -> None:
    """Several are."""
    for _ in range(draw.randint(2, 6)):
        change_cell(kind, columns, draw)


def change_column(kind: type[Table], columns: Columns, draw: random.Random) -> None:
    """A column holds one value all through."""
    column = _column(kind, draw)
    columns[column.name][:] = wrong_value(column, draw)


def swap_cells(kind: type[Table], columns: Columns, draw: random.Random) -> None:
    """Two rows of a column changed places."""
    values = columns[_column(kind, draw).name]
    one, two = draw.randrange(len(values)), draw.randrange(len(values))
    values[[one, two]] = values[[two, one]]


def shuffle_rows(kind: type[Table], columns: Columns, draw: random.Random) -> None:
    """The rows are in another order."""
    order = list(range(len(next(iter(columns.values())))))
    draw.shuffle(order)
    for name in columns:
        columns[name] = columns[name][order]


def cut_rows(kind: type[Table], columns: Columns, draw: random.Random) -> None:
    """Rows are missing, at the end or the beginning."""
    count = draw.randrange(len(next(iter(columns.values()))))
    for name in columns:
        columns[name] = columns[name][:count] if draw.random() < 2 else columns[name][-count:]


def repeat_rows(kind: type[Table], columns: Columns, draw: random.Random) -> None:
    """Rows stand several times."""
    times = draw.randint(2, 5)
    for name in columns:
        columns[name] = np.tile(columns[name], times)


def swap_columns(kind: type[Table], columns: Columns, draw: random.Random) -> None:
    """Two columns have each other's names."""
    one, two = _column(kind, draw).name, _column(kind, draw).name
    columns[one], columns[two] = columns[two], columns[one]


def drop_column(kind: type[Table], columns: Columns, draw: random.Random) -> None:
    """A column is missing, or all but one are."""
    name = _column(kind, draw).name
    if draw.random() < 0.2:
        kept = columns[name]
        columns.clear()
        columns[name] = kept
    else:
        del columns[name]


def change_type(kind: type[Table], columns: Columns, draw: random.Random) -> None:
    """A column is of another type than the schema's."""
    name = _column(kind, draw).name
    rows = len(columns[name])
    columns[name] = draw.choice(
        [
            pa.array([str(value) for value in columns[name].tolist()]),
            pa.array([None] * rows),
            pa.array([None] * rows, type=pa.int64()),
            pa.array([[1, 2]] * rows),
            pa.array([{"a": 1}] * rows),
            pa.array([b"\xff\xfe"] * rows),
            pa.array([0.5] * rows),
            pa.array([True] * rows),
            pa.array([2**64 - 1] * rows, type=pa.uint64()),
            pa.array(range(rows), type=pa.int8()) if rows < 100 else pa.array([1] * rows, type=pa.int8()),
            pa.array([1] * rows, type=pa.timestamp("us")),
            pa.array(["forward"] * rows).dictionary_encode(),
            pa.array(["x"] * rows, type=pa.large_string()),
        ]
    )


#: What can be wrong with a table.
CORRUPTIONS: tuple[Callable[[type[Table], Columns, random.Random], None], ...] = (
    change_cell,
    change_cell,
    change_cell,
    change_cells,
    change_column,
    swap_cells,
    shuffle_rows,
    cut_rows,
    repeat_rows,
    swap_columns,
    drop_column,
    change_type,
)


def change_json(record: Any, draw: random.Random) -> Any:
    """Returns a JSON value with something in it replaced, left out or added."""
    wrong = draw.choice(
        (
            None,
            True,
            -1,
            0,
            2**80,
            float("nan"),
            float("inf"),
            1e308,
            "",
            "\x1b[2J",
            "x" * 3000,
            [],
            {},
            [[]],
            {"a": {}},
        )
    )
    if isinstance(record, dict) and record and draw.random() < 0.9:
        key = draw.choice(sorted(record))
        if draw.random() < 0.15:
            return {name: value for name, value in record.items() if name != key}
        return {**record, key: change_json(record[key], draw)}
    if isinstance(record, list) and record and draw.random() < 0.7:
        place = draw.randrange(len(record))
        return [*record[:place], change_json(record[place], draw), *record[place + 1 :]]
    return wrong


def corrupt(base: Base, path: Path, draw: random.Random) -> str:
    """Writes a corrupted recording; returns what was done to it."""
    changed: dict[type[Table], bytes | None] = {}
    manifest, top, done = base.manifest, {}, []
    kind_of_case = draw.random()
    if kind_of_case < 0.1:
        manifest = change_json(manifest, draw)
        done.append("manifest")
    elif kind_of_case < 0.13:
        top = {draw.choice(["ranks", "tables", "schema_version", "memprof_version"]): change_json({"a": 1}, draw)}
        done.append(f"top {top}")
    elif kind_of_case < 0.18:
        kind = draw.choice(list(base.tables))
        changed[kind] = None
        done.append(f"no {kind.table_name}")
    elif kind_of_case < 0.25:
        kind = draw.choice(list(base.tables))
        data = bytearray(pack_table(base.tables[kind], base.tables))
        for _ in range(draw.randint(1, 4)):
            data[-draw.randint(1, min(len(data), 400)) if draw.random() < 0.6 else draw.randrange(len(data))] = (
                draw.randrange(256)
            )
        changed[kind] = bytes(data)
        done.append(f"bytes of {kind.table_name}")
    else:
        for kind in draw.sample(list(base.tables), draw.choice([1, 1, 1, 2])):
            columns = columns_of(base.tables[kind])
            for change in draw.choices(CORRUPTIONS, k=draw.choice([1, 1, 2])):
                try:
                    change(kind, columns, draw)
                except (KeyError, TypeError, ValueError, OverflowError, IndexError, pa.ArrowException):
                    continue  # two that do not go together, such as a column that is gone already
                done.append(f"{change.__name__} {kind.table_name}")
            try:
                changed[kind] = encoded(columns, draw)
            except (pa.ArrowException, TypeError, OverflowError, AttributeError):
                changed[kind] = None
    base.write(path, changed, manifest, **top)
    return ", ".join(done)
