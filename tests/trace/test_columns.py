"""Tables as Parquet bytes, and some columns read without the others."""

from __future__ import annotations

import io
import pickle
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from memprof.errors import BadInputError
from memprof.trace.files import columns as stored_columns
from memprof.trace.files.coded import Coded
from memprof.trace.files.columns import CorruptTableError, StoredTable
from memprof.trace.files.packing import pack_table, restored
from memprof.trace.files.parquet import encode_table
from memprof.trace.schema import NONE, TABLES, Column, Memory, Ops, Segments, Stacks, Steps, Storages, Table
from memprof.trace.store import Trace, write_trace
from tests.building import Tables, assert_tables_equal, read_table


def random_column(column: Column, rows: int) -> st.SearchStrategy[np.ndarray]:
    """Any values of a column, the missing one included."""
    elements: dict[str, st.SearchStrategy[object]] = {
        "id": st.integers(NONE, 2**63 - 1),
        "int": st.integers(-(2**63), 2**63 - 1),
        # Multiples of 2**-10 us come back as they are; Unix time in us is far above 2**43, where nothing is rounded.
        "float": st.one_of(
            st.integers(-(2**52), 2**52).map(lambda count: count / 1024),
            st.floats(min_value=2.0**43),
            st.just(float("nan")),
        ),
        "bool": st.booleans(),
        "text": st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    }
    return arrays.arrays(column.dtype, rows, elements=elements[column.kind])


@st.composite
def tables(draw: st.DrawFn) -> Table:
    kind = draw(st.sampled_from(TABLES))
    rows = draw(st.integers(0, 8))
    return kind.of(**{column.name: draw(random_column(column, rows)) for column in kind.columns()})


@given(tables())
def test_any_table_comes_back_as_it_was(table: Table) -> None:
    """Writing and reading a table gives the same columns, types and missing values, plain and coded."""
    assert_tables_equal(table, read_table(type(table), encode_table(table)))
    assert_tables_equal(table, read_table(type(table), pack_table(table, {})))


def test_missing_values_are_null_in_the_file() -> None:
    """Ids that point nowhere, missing texts and unknown durations are null to whatever tool reads the file."""
    ops = Ops.of(op_id=[0, 1], module_id=[NONE, 4], name=["", "aten.mm.default"], duration_us=[np.nan, 2.5])
    read = pq.read_table(io.BytesIO(encode_table(ops))).to_pydict()
    assert (read["module_id"], read["name"], read["duration_us"]) == ([None, 4], [None, "aten.mm.default"], [None, 2.5])


def test_durations_keep_a_thousandth_of_a_microsecond() -> None:
    """Times are rounded by less than 0.0005 us."""
    times = np.array([0.1, 123.456789, 98765.4321, 1.7952576e15 + 0.25])
    read = read_table(Steps, encode_table(Steps.of(step=range(4), duration_us=times)))
    assert np.abs(read.duration_us - times).max() < 0.0005
    assert read.duration_us[3] == times[3]


def test_same_table_gives_same_bytes() -> None:
    """Nothing but the table decides the bytes."""
    stacks = Stacks.of(stack_id=range(3), frames=["a.py:1:f", "b.py:2:g", "a.py:1:f"])
    assert encode_table(stacks) == encode_table(stacks.take([0, 1, 2]))


def test_file_names_that_are_no_utf8_are_kept_readable() -> None:
    """A file name that is not valid UTF-8 is written in stacks with the invalid bytes escaped."""
    stacks = Stacks.of(stack_id=[0, 1], frames=["caf\udce9.py:1:main", "b.py:2:g"])
    assert read_table(Stacks, encode_table(stacks)).frames.tolist() == ["caf\\udce9.py:1:main", "b.py:2:g"]


def as_parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def test_columns_of_other_versions() -> None:
    """A column this version does not know is left out; one the file lacks has its missing value."""
    memory = read_table(Memory, as_parquet(op_id=[0, 1], allocated_bytes=[5, 6], colour=["red", "blue"]))
    assert memory.allocated_bytes.tolist() == [5, 6]
    assert memory.device.tolist() == ["", ""]
    assert memory.reserved_bytes.tolist() == [NONE, NONE]
    assert memory.active_bytes.tolist() == [0, 0]
    assert np.isnan(memory.time_us).all()


def test_a_table_of_unknown_columns_keeps_its_rows() -> None:
    """A file with none of the table's columns still has as many rows."""
    assert read_table(Stacks, as_parquet(colour=["red", "blue"])).stack_id.tolist() == [NONE, NONE]


@pytest.mark.parametrize(
    "columns",
    [
        {"op_id": ["first"]},
        {"op_id": [0.5]},
        {"op_id": [[1, 2]]},
        {"device": [7]},
        {"allocated_bytes": [b"\x00"]},
    ],
)
def test_columns_of_another_type_are_refused(columns: dict[str, object]) -> None:
    """A column that holds something else than the schema says is an error, never a guess."""
    with pytest.raises(CorruptTableError, match="its table 'memory' cannot be read"):
        read_table(Memory, as_parquet(**columns))


def test_claims_beyond_the_limit_are_refused_before_reading() -> None:
    """A few bytes that claim a table larger than memory are refused by what they claim."""
    bomb = encode_table(Stacks.of(stack_id=np.zeros(100_000, dtype=np.int64)))
    assert len(bomb) < 2000
    with pytest.raises(CorruptTableError, match="it claims 100000 rows"):
        read_table(Stacks, bomb, limit_bytes=1_000_000)


def test_page_checksums_are_verified() -> None:
    """A changed byte inside a page is noticed even where the page would still decode."""
    data = bytearray(encode_table(Memory.of(op_id=range(1000), allocated_bytes=np.arange(1000)[::-1] * 7919 % 1000)))
    changed = 0
    for place in range(50, 1500, 10):
        data[place] ^= 1
        try:
            read_table(Memory, bytes(data))
        except CorruptTableError:
            changed += 1
        data[place] ^= 1
    assert changed > 140  # all but the odd byte of a page header that tells nothing


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
    monkeypatch.setattr(stored_columns, "AT_ONCE", -1)
    read: list[str] = []
    monkeypatch.setattr(
        stored_columns, "restored", lambda column, *more: read.append(column.name) or restored(column, *more)
    )
    large = Trace.open(SAMPLE).table(kind)
    assert set(read) <= {"step"}  # of the table of steps, which its own are checked against
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


@pytest.mark.parametrize("at_once", [-1, 1 << 16])
def test_what_is_no_part_of_a_table_is_refused(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored tables, read or not yet, refuse what those in memory refuse, and are copied like them."""
    monkeypatch.setattr(stored_columns, "AT_ONCE", at_once)
    table = Trace.open(SAMPLE).table(Ops)
    plain = Ops.of(**{column.name: getattr(Trace.open(SAMPLE).table(Ops), column.name) for column in Ops.columns()})
    for one in (table, plain, table.take(slice(3, 9)), plain.take(slice(3, 9))):
        rows = len(one)
        for rowless in ([rows], [-rows - 1], np.ones(rows + 1, dtype=np.bool_), np.ones(1, dtype=np.bool_)):
            with pytest.raises(IndexError):
                one.take(rowless)
        with pytest.raises(TypeError, match="table ops has no column nonsense"):
            one.replace(nonsense=np.zeros(rows))
        with pytest.raises(ValueError, match="columns of table ops differ in length"):
            one.replace(flops=np.zeros(rows - 1, dtype=np.int64))
        assert_tables_equal(one.take([-1, 0]), plain.take([-1, 0] if rows == len(plain) else [8, 3]))
        assert_tables_equal(one, pickle.loads(pickle.dumps(one)))


def test_columns_that_are_not_used_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that is checked against another is read with it."""
    monkeypatch.setattr(stored_columns, "AT_ONCE", -1)
    read: list[str] = []
    monkeypatch.setattr(
        stored_columns, "restored", lambda column, *more: read.append(column.name) or restored(column, *more)
    )
    storages = Trace.open(SAMPLE).table(Storages)
    assert len(storages.take([0, 1]).created_op_id) == 2
    assert read == ["created_op_id", "freed_op_id"]


def test_threads_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dashboard reads in several threads, and Arrow reads a file in one at a time: others wait."""
    monkeypatch.setattr(stored_columns, "AT_ONCE", -1)
    reading, read, trace = threading.RLock(), StoredTable.read, Trace.open(SAMPLE)
    names = [column.name for column in Ops.columns()]

    def alone(*arguments: Any) -> dict[str, Any]:
        assert reading.acquire(blocking=False), "two threads read at once"
        time.sleep(0.001)
        try:
            return read(*arguments)
        finally:
            reading.release()

    def table(first: int) -> Table:
        for name in names[first:] + names[:first]:
            getattr(trace.table(Ops), name)
        return trace.table(Ops)

    monkeypatch.setattr(StoredTable, "read", alone)
    with ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(table, range(8)))
    assert all(one is tables[0] for one in tables)
    assert_tables_equal(Trace.open(SAMPLE).table(Ops), tables[0])


def test_damage_of_a_large_table_is_told_where_it_is_used(small_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file, as that of a small table does."""
    container = Trace.open(small_file)
    storages = container.table(Storages)
    damaged = storages.replace(freed_op_id=np.where(storages.created_op_id > 1, 0, storages.freed_op_id))
    tables = {kind: container.table(kind) for kind in TABLES} | {Storages: damaged}
    write_trace(small_file, [(container.manifest, tables)])
    monkeypatch.setattr(stored_columns, "AT_ONCE", -1)
    table = Trace.open(small_file).table(Storages)
    assert len(table.allocated_bytes) == len(storages)
    with pytest.raises(BadInputError, match=r"run\.memprof is damaged.*is freed before it is made"):
        _ = table.created_op_id


def test_steps_of_operators_are_checked_without_being_used(
    small_file: Path, small_tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks of steps are found by their operators' ids."""
    small_tables[Steps] = small_tables[Steps].replace(step=np.array([0, 2]))
    write_trace(small_file, [(Trace.open(small_file).manifest, small_tables)])
    monkeypatch.setattr(stored_columns, "AT_ONCE", -1)
    with pytest.raises(BadInputError, match="table ops, row 3: step 1 is not among the steps"):
        _ = Trace.open(small_file).table(Ops).op_id


def test_a_large_table_outlives_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that is written again does not reach the columns of tables read from the one before."""
    path = Path(shutil.copy(SAMPLE, tmp_path))
    monkeypatch.setattr(stored_columns, "AT_ONCE", -1)
    trace = Trace.open(path)
    tables = [trace.table(kind) for kind in TABLES]
    path.write_bytes(b"")
    for table in tables:
        assert_tables_equal(Trace.open(SAMPLE).table(type(table)), table)


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
