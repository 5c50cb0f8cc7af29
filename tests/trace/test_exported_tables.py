"""Tables as folders of CSV and Parquet: every value comes back, and no cell of a CSV is a formula."""

from __future__ import annotations

import csv
import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from memprof.errors import UsageError
from memprof.trace.exporters.tables import is_export, named_tables, write_tables
from memprof.trace.files.whole_file import whole_folder
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, RANK_TABLES, TABLES, Modules, Ops, Stacks, Storages, Table
from memprof.trace.store import Trace
from tests.building import Op, Storage, make_tables

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "lstm" / "run.memprof"


def written(path: Path, trace: Trace, form: str, *names: str) -> Path:
    write_tables(path, trace, trace.ranks, named_tables(names), form)
    return path


def cells(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def same(read: pd.Series[Any], column: np.ndarray[Any, Any], kind: str, mark: str) -> bool:
    """Compares a column as pandas reads it with the table's own; missing values are NaN there."""
    if kind == "text":
        return list(read.astype(object).fillna("").map(lambda text: text[1:] if text[:1] == mark else text)) == list(
            column
        )
    if kind == "id":
        return np.array_equal(read.fillna(NONE).astype(np.int64), column)
    return np.array_equal(read.astype(column.dtype), column, equal_nan=kind == "float")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_every_value_comes_back(tmp_path: Path, form: str) -> None:
    """Pandas reads each table of a sample, and every column is what the recording holds."""
    trace = Trace.open(SAMPLE)
    folder = written(tmp_path, trace, form)
    for kind in TABLES:
        path = folder / f"{kind.table_name}.{form}"
        frame = pd.read_parquet(path) if form == "parquet" else pd.read_csv(path, keep_default_na=False, na_values=[""])
        assert list(frame) == [column.name for column in kind.columns()]
        table = trace.table(kind)
        for column in kind.columns():
            read, held = frame[column.name], getattr(table, column.name)
            assert len(read) == len(held)
            assert not len(held) or same(read, held, column.kind, "'" if form == "csv" else "\0"), column.name


def hostile(*texts: str) -> Trace:
    stacks = Stacks.of(stack_id=range(len(texts)), frames=list(texts))
    return Trace.of([(Manifest(), {Stacks: stacks})], "made.memprof")


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    """What a spreadsheet would run has an apostrophe before it, which is taken off to get the text again."""
    texts = ["=1+1", "+x", "-x", "@SUM(A1)", "\t=1", " =1", "'quoted", '=HYPERLINK("http://x","y"),z', "plain=1", "a-b"]
    path = written(tmp_path, hostile(*texts), "csv", "stacks") / "stacks.csv"
    found = [row["frames"] for row in cells(path)]
    assert [text[0] for text in found[:8]] == ["'"] * 8
    assert found[8:] == texts[8:]
    assert [text.removeprefix("'") if text[0] == "'" else text for text in found] == texts


def test_negative_numbers_stay_numbers(tmp_path: Path) -> None:
    """A number is no text: -512 is not quoted. Nothing is a missing id and an unknown duration."""
    tables = make_tables([[Op(workspace=-512, duration_us=float("nan"))]], [])
    written(tmp_path, Trace.of([(Manifest(), tables)], "x"), "csv", "ops")
    (row,) = cells(tmp_path / "ops.csv")
    assert (row["workspace_bytes"], row["module_id"], row["duration_us"]) == ("-512", "", "")


def test_half_a_character_is_no_error(tmp_path: Path) -> None:
    """A file name that is not UTF-8 becomes one that is."""
    written(tmp_path, hostile("\udcff.py:1:f"), "csv", "stacks")
    assert cells(tmp_path / "stacks.csv")[0]["frames"] == "?.py:1:f"


def test_units_and_meanings_lie_beside_them(tmp_path: Path) -> None:
    """tables.json names every file with its rows, and every column with type, unit and meaning."""
    trace = Trace.open(SAMPLE)
    content = json.loads((written(tmp_path, trace, "parquet") / "tables.json").read_text())
    assert {entry["file"]: entry["rows"] for entry in content["files"]} == {
        f"{kind.table_name}.parquet": len(trace.table(kind)) for kind in TABLES
    }
    columns = {column["name"]: column for column in content["tables"]["storages"]["columns"]}
    assert columns["allocated_bytes"]["unit"] == "bytes"
    assert columns["category"]["values"][0] == "parameter"
    assert {column["unit"] for column in content["tables"]["ops"]["columns"]} == {"", "bytes", "microseconds"}
    assert "tables.json" in (tmp_path / "README.txt").read_text()
    assert is_export(tmp_path)


def test_tables_by_name() -> None:
    """In the schema's order; a misspelt one is answered with its nearest."""
    assert named_tables(["storages", "ops"]) == (Ops, Storages)
    assert named_tables([]) == TABLES
    with pytest.raises(UsageError, match="did you mean storages"):
        named_tables(["storage"])


def test_ranks_have_a_folder_each(tmp_path: Path) -> None:
    """Two ranks: rank0/ and rank1/, and next to them the tables that compare ranks."""
    ranks: list[tuple[Manifest, dict[type[Table], Table]]] = [
        (Manifest(rank=rank, world_size=2), make_tables([[Op(makes=["x"])]], [Storage("x", 100 * (1 + rank))]))
        for rank in range(2)
    ]
    written(tmp_path, Trace.of(ranks, "x"), "parquet", "storages")
    sizes = [pq.read_table(tmp_path / f"rank{rank}" / "storages.parquet")["allocated_bytes"] for rank in (0, 1)]
    assert [one.to_pylist() for one in sizes] == [[100], [200]]
    assert {path.name for path in tmp_path.glob("*.parquet")} == {f"{kind.table_name}.parquet" for kind in RANK_TABLES}


def test_more_rows_than_are_written_at_a_time(tmp_path: Path) -> None:
    """Row 65,536 follows row 65,535, each once."""
    modules = Modules.of(module_id=range(70_000), name=[f"m{row}" for row in range(70_000)])
    written(tmp_path, Trace.of([(Manifest(), {Modules: modules})], "x"), "csv", "modules")
    rows = cells(tmp_path / "modules.csv")
    assert [row["module_id"] for row in rows] == [str(row) for row in range(70_000)]
    assert rows[65_536]["name"] == "m65536"


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """A disk that fills up leaves the folder that was there, and nothing else."""
    place = tmp_path / "tables"
    place.mkdir()
    (place / "old").write_text("kept")

    def fill(ends: bool) -> None:
        with whole_folder(place) as folder:
            (folder / "new").write_text("half")
            if not ends:
                raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fill(ends=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["tables", "old"]
    fill(ends=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["tables", "new"]
