"""Some columns of a table, read without the others: the same values as the table's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import BadInputError
from memprof.trace.files import columns
from memprof.trace.files.coded import Coded
from memprof.trace.files.columns import CorruptTableError, StoredTable
from memprof.trace.files.packing import restored
from memprof.trace.files.parquet import encode_table
from memprof.trace.schema import NONE, TABLES, Ops, Segments, Storages, Table
from memprof.trace.store import Trace, write_trace
from tests.building import Tables, assert_tables_equal

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.table_name)
def test_columns_are_the_tables(kind: type[Table]) -> None:
    """Every column of every table, one at a time, from a file: numbers alike, texts once decoded."""
    trace = Trace.open(SAMPLE)
    table = trace.table(kind)
    for column in kind.columns():
        values = trace.columns(kind, column.name)[column.name]
        whole = getattr(table, column.name)
        assert len(values) == len(whole)
        np.testing.assert_array_equal(values[:] if column.kind == "text" else values, whole)
        assert isinstance(values, Coded) == (column.kind == "text")


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.table_name)
def test_large_tables_are_read_on_first_use(kind: type[Table], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in part, and in part of a part, with a column replaced: as tables that are read at once."""
    whole = Trace.open(SAMPLE).table(kind)
    monkeypatch.setattr(columns, "AT_ONCE", -1)
    read: list[str] = []
    monkeypatch.setattr(columns, "restored", lambda column, *more: read.append(column.name) or restored(column, *more))
    large = Trace.open(SAMPLE).table(kind)
    assert not read
    assert len(large) == len(whole)
    first = kind.columns()[0].name
    changed = {first: getattr(whole, first)[::-1]}
    some, is_some = np.arange(len(whole))[1::2], np.arange(len(whole)) % 3 == 0
    for rows in (some, some.tolist(), is_some, slice(1, -1), slice(None, None, 2)):
        part, other = large.take(rows), whole.take(rows)
        assert len(part) == len(other)
        assert_tables_equal(other, part)
        assert_tables_equal(other.take(slice(1, 9)), part.take(slice(1, 9)))
        assert_tables_equal(whole.replace(**changed).take(rows), large.replace(**changed).take(rows))
    assert_tables_equal(whole, large)


def test_columns_that_are_not_used_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that is checked against another is read with it."""
    monkeypatch.setattr(columns, "AT_ONCE", -1)
    read: list[str] = []
    monkeypatch.setattr(columns, "restored", lambda column, *more: read.append(column.name) or restored(column, *more))
    storages = Trace.open(SAMPLE).table(Storages)
    assert len(storages.take([0, 1]).created_op_id) == 2
    assert read == ["created_op_id", "freed_op_id"]


def test_damage_of_a_large_table_is_told_where_it_is_used(small_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file, as that of a small table does."""
    container = Trace.open(small_file)
    storages = container.table(Storages)
    damaged = storages.replace(freed_op_id=np.where(storages.created_op_id > 1, 0, storages.freed_op_id))
    tables = {kind: container.table(kind) for kind in TABLES} | {Storages: damaged}
    write_trace(small_file, [(container.manifest, tables)])
    monkeypatch.setattr(columns, "AT_ONCE", -1)
    table = Trace.open(small_file).table(Storages)
    assert len(table.allocated_bytes) == len(storages)
    with pytest.raises(BadInputError, match=r"run\.memprof is damaged.*is freed before it is made"):
        _ = table.created_op_id


def test_columns_of_a_trace_in_memory(small_tables: Tables) -> None:
    """What was never in a file reads the same way."""
    trace = Trace.of([(Trace.open(SAMPLE).manifest, small_tables)], "memory.memprof")
    read = trace.columns(Ops, "name", "step")
    assert read["name"][:].tolist() == small_tables[Ops].name.tolist()  # type: ignore[attr-defined]
    assert read["step"].tolist() == [0, 0, 0, 1, 1, 1]


def test_a_table_the_file_lacks_has_empty_columns() -> None:
    """A recording on CPU has no segments."""
    read = Trace.open(SAMPLE).columns(Segments, "device", "address")
    assert (len(read["device"]), len(read["address"])) == (0, 0)


def test_missing_ids_and_texts(small_file: Path) -> None:
    """Null in the file is NONE or an empty text."""
    read = Trace.open(small_file).columns(Storages, "created_op_id", "freed_op_id", "shape", "category")
    assert read["created_op_id"].tolist().count(NONE) == 2
    assert set(read["shape"][:].tolist()) == {""}
    assert set(read["category"][:].tolist()) == {"input", "parameter", "activation", "gradient"}


def test_a_column_an_older_file_lacks_is_missing_everywhere() -> None:
    """As in the whole table."""
    data = encode_table(Storages.of(storage_id=[0, 1], category=["input", "input"]))
    read = StoredTable(Ops, data).read(["op_id", "name"])
    assert read["op_id"].tolist() == [NONE, NONE]
    assert read["name"][:].tolist() == ["", ""]


def test_damage_is_told(small_file: Path) -> None:
    """A damaged table causes an error that names the file, whichever column is read."""
    data = bytearray(small_file.read_bytes())
    at = data.index(b"storages.parquetPAR1") + 16
    data[at + 20 : at + 60] = bytes(40)
    small_file.write_bytes(data)
    trace = Trace.open(small_file)
    with pytest.raises(BadInputError, match=r"run\.memprof"):
        trace.columns(Storages, "storage_id", "category")


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_table_or_a_sentence(data: bytes) -> None:
    """Bytes that are not Parquet are refused, without an internal error."""
    with pytest.raises(CorruptTableError):
        StoredTable(Ops, data).read(["name", "step"])


@given(texts=st.lists(st.sampled_from(["", "a", "b", "<i>", "\u202e"]), max_size=50))
def test_coded_texts_are_the_texts(texts: list[str]) -> None:
    """Coding loses nothing and repeats nothing."""
    column: np.ndarray = np.empty(len(texts), dtype=object)
    column[:] = texts
    coded = Coded.of(column)
    assert coded[:].tolist() == texts
    assert len(coded) == len(texts)
    assert len(set(coded.distinct.tolist())) == len(coded.distinct)
    assert [coded[row] for row in range(len(texts))] == texts
