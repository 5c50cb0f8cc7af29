"""Coded columns: smaller than the values, equal to them when read, and refused where they contradict themselves."""

from __future__ import annotations

import json
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
from memprof.trace.files.archive import Archive, write_archive
from memprof.trace.files.coded import differences, distances, from_distances
from memprof.trace.files.columns import CorruptTableError, StoredTable
from memprof.trace.files.packing import pack_table
from memprof.trace.schema import NONE, AllocatorEvents, Memory, Ops, Storages
from memprof.trace.store import Trace
from tests.building import assert_tables_equal, read_table

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"

NUMBERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 3))


@given(arrays.arrays(np.int64, st.integers(0, 40), elements=NUMBERS))
def test_series_come_back_as_they_were(values: np.ndarray) -> None:
    """Extreme values wrap around, and repeated ones are found."""
    assert np.cumsum(differences(values), dtype=np.int64).tolist() == values.tolist()
    apart, new = distances(values)
    assert len(set(new.tolist())) == len(new)
    assert from_distances(apart, new).tolist() == values.tolist()


def test_distances_reach_over_many_rows() -> None:
    """Chains of repeated values are followed through blocks of any number."""
    values = np.random.default_rng(0).integers(0, 50, 200_000) * 64
    apart, new = distances(values)
    assert len(new) == 50
    np.testing.assert_array_equal(from_distances(apart, new), values)


@pytest.mark.parametrize(
    ("apart", "new"), [([1, 1], []), ([0, 2], [5]), ([0, -1], [5]), ([0, 0], [5]), ([0, 1], [5, 6])]
)
def test_distances_that_point_outside_are_refused(apart: list[int], new: list[int]) -> None:
    """Before the first row, forwards, or to more new values than there are."""
    with pytest.raises(ValueError, match="outside the table"):
        from_distances(np.array(apart), np.array(new, dtype=np.int64))


def columns_in(data: bytes) -> list[str]:
    return pq.read_schema(pa.BufferReader(data)).names


def test_addresses_and_times_of_events_are_coded() -> None:
    """Addresses that are reused become distances, times differences of ticks, and one device is named once."""
    rows = 3000
    random = np.random.default_rng(0)
    events = AllocatorEvents.of(
        index=range(rows),
        time_us=1.7952576e15 + np.cumsum(random.integers(1, 99, rows)) / 4,
        device=["cpu"] * rows,
        action=["alloc", "free"] * (rows // 2),
        address=np.repeat(random.choice(2**40, 100), 2)[np.arange(rows) % 200],
        size_bytes=np.full(rows, 64),
    )
    data = pack_table(events, {})
    assert columns_in(data) == ["index:d", "time_us:td", "action", "address:n", "address:r"]
    assert len(data) < 5_000
    assert_tables_equal(events, read_table(AllocatorEvents, data))


def test_equal_columns_are_stored_once() -> None:
    """On a CPU the allocator rounds nothing, so both sizes are equal; with the same rows missing or not at all."""
    sizes = np.random.default_rng(0).integers(0, 2**30, 50)
    storages = Storages.of(
        storage_id=range(50), requested_bytes=sizes, allocated_bytes=sizes, freed_op_id=[NONE, 3] * 25
    )
    data = pack_table(storages, {})
    assert columns_in(data) == [
        "storage_id:d",
        "requested_bytes",
        "freed_op_id:d",
    ] or "allocated_bytes" not in columns_in(data)
    assert_tables_equal(storages, read_table(Storages, data))
    read = StoredTable(Storages, data).read(["allocated_bytes"])["allocated_bytes"]
    np.testing.assert_array_equal(read, sizes)


def test_a_column_of_another_table_is_read_from_there(tmp_path: Path) -> None:
    """Operators are sampled when they start: the sample's recording keeps these times once."""
    old = Trace.open(SAMPLE)
    path = tmp_path / "run.memprof"
    old_ops, old_memory = old.table(Ops), old.table(Memory)
    np.testing.assert_array_equal(old_memory.time_us, old_ops.start_us)
    data = pack_table(old_memory, {Ops: old_ops})
    assert not any(name.startswith("time_us") for name in columns_in(data))
    with pytest.raises(CorruptTableError, match="'time_us' is in another table"):
        read_table(Memory, data)

    path.write_bytes(SAMPLE.read_bytes())
    archive = Archive.open(path)
    entries = {name: archive.read(name) for name in archive.entries} | {"rank0/memory.parquet": data}
    write_archive(path, entries.items())
    assert_tables_equal(old_memory, Trace.open(path).table(Memory))
    read = Trace.open(path).columns(Memory, "time_us")["time_us"]
    np.testing.assert_array_equal(read, old_ops.start_us)

    other = pack_table(Ops.of(op_id=[0], phase=["other"], kind=["compute"]), {})
    top = json.loads(entries["manifest.json"])
    top["tables"]["rank0/ops.parquet"] = 1
    entries |= {"rank0/ops.parquet": other, "manifest.json": json.dumps(top).encode()}
    write_archive(path, entries.items())
    with pytest.raises(BadInputError, match="table 'ops' has another number of rows"):
        Trace.open(path).columns(Memory, "time_us")


def coded(metadata: Any, **columns: Any) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table(columns)
    said = metadata if isinstance(metadata, str) else json.dumps(metadata)
    with pq.ParquetWriter(sink, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"memprof": said})
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("metadata", "columns"),
    [
        ("{", {}),
        ([], {}),
        ({"same": []}, {}),
        ({"same": {"step": 3}}, {}),
        ({"constant": 5}, {}),
        ({"constant": {"step": "text"}}, {}),
        ({"constant": {"step": 2**70}}, {}),
        ({"constant": {"step": True}}, {}),
        ({"constant": {"duration_us": 1}}, {}),
        ({"constant": {"phase": 1}}, {}),
        ({"same": {"step": "uses.op_id"}}, {}),
        ({"same": {"step": "name"}}, {"name": ["a", "b"]}),
        ({"same": {"step": "forward_op_id"}}, {}),
        ({"same": {"phase": "name"}}, {"name": ["a", "b"]}),
        ({}, {"step:z": [1, 2]}),
        ({}, {"step:dr": [1, 2]}),
        ({"same": {"step": "start_us"}}, {"start_us:t": [1, 2]}),
        ({}, {"step:t": [1, 2]}),
        ({}, {"step:r": [0, 1]}),
        ({}, {"step:r": [0, 5], "step:n": [4, None]}),
        ({}, {"start_us:d": [0.5, 1.5]}),
        ({}, {"uses_rng:d": [True, False]}),
    ],
)
def test_codings_that_make_no_sense_are_refused(metadata: Any, columns: dict[str, Any]) -> None:
    """What a file says about its columns is checked, and never trusted."""
    with pytest.raises(CorruptTableError, match="its table 'ops' cannot be read"):
        read_table(Ops, coded(metadata, op_id=[0, 1], **columns))
