"""Leaving the warm-up out of a recording."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.trace.files.trim import drop_warm_up
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, AllocatorEvents, Memory, ModuleCalls, Ops, Steps, Storages, Uses
from memprof.trace.store import Trace
from tests.building import Op, Storage, Tables, assert_tables_equal, make_tables
from tests.strategies import jobs


@pytest.fixture
def tables() -> Tables:
    """A warm-up of two operators, then two recorded steps of one; ``state`` is born in the warm-up and lives on."""
    warm_up = [
        Op(module="net", makes=["state", "brief"]),
        Op(reads=["brief"], frees=["brief", "old"], saves=["weight"], phase="backward"),
    ]
    recorded = [Op(module="net", reads=["state", "weight"], makes=["y"], frees=["y"], saves=["state"])]
    storages = [Storage("weight", 64, "parameter"), Storage("old", 8), Storage("state", 32, "optimizer_state")]
    storages += [Storage("brief", 16), Storage("y", 4)]
    return make_tables([warm_up, recorded, recorded], storages, kinds=["warm_up", "recorded", "recorded"])


def test_warm_up_goes_and_what_outlives_it_stays(tables: Tables) -> None:
    """Operators of the warm-up and storages that died in it go; ids are dense again; what lives on is from before."""
    trimmed = Trace.of([(Manifest(), drop_warm_up(tables))], "trimmed")
    assert trimmed.table(Ops).op_id.tolist() == [0, 1]
    assert trimmed.table(Ops).step.tolist() == [1, 2]
    storages = trimmed.table(Storages)
    assert storages.storage_id.tolist() == [0, 1, 2, 3]
    assert storages.allocated_bytes.tolist() == [64, 32, 4, 4]  # weight, state, y, y again
    assert storages.created_op_id.tolist() == [NONE, NONE, 0, 1]
    assert storages.freed_op_id.tolist() == [NONE, NONE, 0, 1]
    assert trimmed.table(Uses).storage_id.tolist() == [1, 0, 2, 1, 0, 3]
    assert trimmed.table(Memory).allocated_bytes.tolist() == [100, 100]
    assert trimmed.table(AllocatorEvents).op_id.tolist() == [0, 0, 1, 1]
    assert trimmed.table(ModuleCalls).module_call_id.tolist() == [0, 1, 2, 3]
    assert trimmed.table(ModuleCalls).parent_call_id.tolist() == [NONE, 0, NONE, 2]


def test_rows_of_steps_stay(tables: Tables) -> None:
    """The warm-up is still told among the steps, without operators."""
    steps = Trace.of([(Manifest(), drop_warm_up(tables))], "trimmed").table(Steps)
    assert steps.kind.tolist() == ["warm_up", "recorded", "recorded"]
    assert steps.first_op_id.tolist() == [NONE, 0, 1]
    assert steps.last_op_id.tolist() == [NONE, 0, 1]


@pytest.mark.parametrize("kinds", [["warm_up", "warm_up", "warm_up"], ["warm_up", "recorded", "recorded"]])
def test_a_recording_that_ends_early_keeps_its_warm_up(tables: Tables, kinds: list[str]) -> None:
    """Without a complete recorded step the warm-up is all there is: nothing is removed."""
    steps = Steps.of(
        step=[0, 1, 2], kind=kinds, first_op_id=[0, 2, 3], last_op_id=[1, 2, 3], is_complete=[True, False, False]
    )
    tables[Steps] = steps
    kept = drop_warm_up(tables)
    for kind, table in tables.items():
        assert_tables_equal(kept[kind], table)


@given(jobs(), st.data())
def test_replaying_what_is_kept_gives_the_same(job: tuple[list[list[Op]], list[Storage]], data: st.DataObject) -> None:
    """In any job, every kept step is the same step after trimming, to the byte."""
    steps, storages = job
    warm = data.draw(st.integers(0, len(steps) - 1))
    tables = make_tables(steps, storages, kinds=["warm_up"] * warm + ["recorded"] * (len(steps) - warm))
    whole = Trace.of([(Manifest(), tables)], "whole")
    trimmed = Trace.of([(Manifest(), drop_warm_up(tables))], "trimmed")
    assert trimmed.recorded_steps == whole.recorded_steps == tuple(range(warm, len(steps)))
    kept = trimmed.table(Ops), trimmed.table(Storages)
    assert [len(table) for table in kept] == [kept[0].op_id.max() + 1, kept[1].storage_id.max(initial=-1) + 1]
    for number in trimmed.recorded_steps:
        one, other = whole.step(number), trimmed.step(number)
        other.check()
        for name in ("uses", "saved", "module_calls"):
            assert_tables_equal(getattr(one, name), getattr(other, name))
        assert_tables_equal(one.ops, other.ops)
        assert_tables_equal(one.storages, other.storages)
        assert_tables_equal(one.memory, other.memory)
        assert np.array_equal(one.born_bytes(), other.born_bytes())
