"""Some columns of a table, read without the others: the same values as the table's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import BadInputError
from memprof.trace.files.coded import Coded
from memprof.trace.files.columns import CorruptTableError, StoredTable
from memprof.trace.files.parquet import encode_table
from memprof.trace.schema import NONE, TABLES, Ops, Segments, Storages, Table
from memprof.trace.store import Trace
from tests.building import Tables

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
