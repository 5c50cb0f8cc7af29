"""Exports the tables of a recording as a folder of CSV or Parquet files, with a description of units and meanings."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from memprof.errors import BadInputError, UsageError
from memprof.trace.exporters.trace_events import whole_text
from memprof.trace.files.container import columns_of
from memprof.trace.files.parquet import encode_columns, encode_table
from memprof.trace.schema import NONE, RANK_TABLES, SCHEMA_VERSION, TABLES, Column, Table
from memprof.trace.store import Trace
from memprof.version import __version__

#: The file that describes the others; its presence marks a folder written by this module.
CONTENTS = "tables.json"
FORMAT = "memprof-tables/1"

#: Rows written at a time.
_CHUNK = 65_536
#: Characters that a spreadsheet may take as the start of a formula, and those it strips before checking.
_RUN_BY_SPREADSHEETS = ("=", "+", "-", "@", "\t", "\r", "\n", " ")
_MARK = "'"
_UNITS = {"_bytes": "bytes", "_us": "microseconds"}

_README = """memprof wrote these tables of the recording {source}, one file a table.
Columns whose names end in _bytes are bytes, those in _us microseconds (moments are Unix time). {missing}
{files} lists every table, and each column with its type, unit and meaning.
"""
_CSV_MISSING = (
    "An empty cell is a missing value.\nA text that a spreadsheet could run as a formula (it begins with =, +, -, @ or "
    "a blank), or that begins\nwith an apostrophe, has an apostrophe put before it: take one leading apostrophe off "
    "to get the text."
)
_PARQUET_MISSING = "Null is a missing value."


def named_tables(names: Sequence[str]) -> tuple[type[Table], ...]:
    """Finds tables by name, in schema order; all tables of a process if none is named.

    Raises:
        UsageError: There is no such table.
    """
    known = {kind.table_name: kind for kind in TABLES}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"the tables are {', '.join(known)}."
            raise UsageError(f"no table {name!r}: {advice}")
    return tuple(kind for name, kind in known.items() if not names or name in names)


def is_export(folder: Path) -> bool:
    """Returns whether a folder holds exported tables, and so may be replaced."""
    try:
        content = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def write_tables(folder: Path, trace: Trace, ranks: Sequence[int], kinds: Sequence[type[Table]], form: str) -> int:
    """Writes tables of a recording, holding one at a time in memory.

    Tables of a single rank go into the folder itself, those of several ranks into a folder each (``rank0``, ...),
    next to the tables that summarise the ranks.

    Returns:
        Bytes written.

    Raises:
        BadInputError: A table is damaged.
    """
    written: dict[str, int] = {}
    size = 0
    for rank in ranks:
        one = trace.fresh(rank)
        inside = folder if len(ranks) == 1 else folder / f"rank{rank}"
        inside.mkdir(exist_ok=True)
        for kind in kinds:
            path = inside / f"{kind.table_name}.{form}"
            written[path.relative_to(folder).as_posix()] = _write_rank_table(path, one, kind, form)
            size += path.stat().st_size
    described = list(kinds)
    if len(ranks) > 1:
        for summary in RANK_TABLES:
            path = folder / f"{summary.table_name}.{form}"
            table = trace.summary(summary)
            written[path.name] = _write(path, table, form)
            size += path.stat().st_size
        described += RANK_TABLES
    texts = {
        CONTENTS: json.dumps(_contents(trace, ranks, described, written, form), indent=2, ensure_ascii=False) + "\n",
        "README.txt": _README.format(
            source=trace.path.name, missing=_CSV_MISSING if form == "csv" else _PARQUET_MISSING, files=CONTENTS
        ),
    }
    for name, text in texts.items():
        data = text.encode("utf-8", "replace")
        (folder / name).write_bytes(data)
        size += len(data)
    return size


def _write_rank_table(path: Path, trace: Trace, kind: type[Table], form: str) -> int:
    if form == "parquet":
        path.write_bytes(encode_columns(kind.columns(), lambda column: trace.columns(kind, column.name)[column.name]))
        return int(pq.read_metadata(path).num_rows)
    columns = trace.columns(kind, *(column.name for column in kind.columns()))
    return _write_csv(path, kind, columns)


def _write(path: Path, table: Table, form: str) -> int:
    if form == "parquet":
        path.write_bytes(encode_table(table))
        return len(table)
    return _write_csv(path, type(table), columns_of(table, [column.name for column in table.columns()]))


def _write_csv(path: Path, kind: type[Table], values: dict[str, Any]) -> int:
    columns = kind.columns()
    rows = len(values[columns[0].name])
    if any(len(values[column.name]) != rows for column in columns):
        raise BadInputError(f"the columns of table {kind.table_name!r} differ in length.")
    safe = {
        column.name: pa.array(
            [_safe(text) if text else None for text in values[column.name].distinct.tolist()], type=pa.string()
        )
        for column in columns
        if column.kind == "text"
    }
    schema = pa.schema([(column.name, _TYPES[column.kind]) for column in columns])
    with pa_csv.CSVWriter(str(path), schema) as writer:
        for low in range(0, rows, _CHUNK):
            chunk = slice(low, low + _CHUNK)
            arrays = [_array(column, values[column.name], safe.get(column.name), chunk) for column in columns]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    return rows


_TYPES: dict[str, pa.DataType] = {
    "id": pa.int64(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "text": pa.string(),
}


def _array(column: Column, values: Any, texts: Any, rows: slice) -> Any:
    """Returns some rows of a column as an Arrow array, missing values as nulls."""
    if column.kind == "text":
        return texts.take(pa.array(values.codes[rows]))
    part = values[rows]
    mask = {"id": lambda: part == NONE, "float": lambda: np.isnan(part)}.get(column.kind)
    return pa.array(part, type=_TYPES[column.kind], mask=None if mask is None else mask())


def _safe(text: str) -> str:
    """Returns a text safe for spreadsheets: one that could run as a formula gets a leading apostrophe."""
    known = whole_text(text)
    return f"{_MARK}{known}" if known.startswith((*_RUN_BY_SPREADSHEETS, _MARK)) else known


def _contents(
    trace: Trace, ranks: Sequence[int], kinds: Iterable[type[Table]], written: dict[str, int], form: str
) -> dict[str, Any]:
    """Describes the folder: files with their row counts, tables with their columns."""
    return {
        "format": FORMAT,
        "made_by": f"memprof {__version__}",
        "schema_version": SCHEMA_VERSION,
        "recording": trace.path.name,
        "ranks": list(ranks),
        "files_are": form,
        "files": [{"file": file, "rows": rows} for file, rows in written.items()],
        "tables": {
            kind.table_name: {
                "meaning": (kind.__doc__ or "").strip(),
                "columns": [
                    {
                        "name": column.name,
                        "type": column.kind,
                        "unit": next((unit for end, unit in _UNITS.items() if column.name.endswith(end)), ""),
                        "meaning": column.meaning,
                        **({"values": list(column.values)} if column.values else {}),
                    }
                    for column in kind.columns()
                ],
            }
            for kind in kinds
        },
    }
