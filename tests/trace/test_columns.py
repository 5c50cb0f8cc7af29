"""Tables as Parquet bytes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from memprof.trace.files.columns import CorruptTableError
from memprof.trace.files.packing import pack_table
from memprof.trace.files.parquet import encode_table
from memprof.trace.schema import NONE, TABLES, Column, Memory, Ops, Stacks, Steps, Table
from tests.building import assert_tables_equal, read_table


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
