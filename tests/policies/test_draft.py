"""Rewriting steps."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import given

from memprof.errors import InvariantError
from memprof.policies.rewrite.draft import Draft
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE, Ops, Storages, Uses
from memprof.trace.step import Step
from tests.building import Op, Storage, make_step, make_trace
from tests.strategies import jobs


@pytest.fixture
def step() -> Step:
    """Makes a (20 bytes), then b (30) of it, then frees both; a is saved by the first operator for the last."""
    return make_step(
        [
            Op(name="one", module="m", makes=["a"], saves=["a"]),
            Op(name="two", module="m", makes=["b"], reads=["a"]),
            Op(name="three", phase="backward", reads=["a", "b"], frees=["a", "b"], forward=0),
        ],
        [Storage("w", 100, "parameter"), Storage("a", 20), Storage("b", 30)],
    )


def row(name: str) -> Ops:
    return Ops.of(op_id=[0], name=np.array([name], dtype=object), duration_us=[1.0])


def same(one: Step, other: Step) -> bool:
    tables = ("ops", "storages", "uses", "saved", "module_calls")
    return all(
        np.array_equal(getattr(getattr(one, table), field.name), getattr(getattr(other, table), field.name), equal_nan)
        for table in tables
        for field in dataclasses.fields(getattr(one, table))
        for equal_nan in [getattr(getattr(one, table), field.name).dtype.kind == "f"]
    )


@given(jobs())
def test_an_unchanged_draft_is_the_step(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """Only the recorded counters are gone: nobody counted the new step."""
    trace = make_trace(*job)
    for number in trace.recorded_steps:
        built = Draft(trace.step(number)).build()
        assert same(built, trace.step(number))
        assert len(built.memory) == 0


def test_operators_and_storages_are_inserted(step: Step) -> None:
    """A copy of b's maker before the last operator, with a storage of its own: everything after it moves by one."""
    before = copy.deepcopy(step)
    draft = Draft(step)
    (op,) = draft.insert_ops(row("again"), before=2)
    (storage,) = draft.insert_storages(
        Storages.of(storage_id=[0], allocated_bytes=[7], created_op_id=[op], freed_op_id=[2])
    )
    draft.insert_uses(Uses.of(op_id=[op], storage_id=[storage], role=np.array(["write"], dtype=object)))
    built = draft.build()
    assert list(built.ops.name) == ["one", "two", "again", "three"]
    assert built.storages.created_op_id.tolist() == [NONE, 0, 1, 2]
    assert built.storages.freed_op_id.tolist() == [NONE, 3, 3, 3]
    assert built.ops.forward_op_id.tolist() == [NONE, NONE, NONE, 0]
    assert built.saved.released_op_id.tolist() == [3]
    assert live_bytes(built).during.tolist() == [120, 150, 157, 157]
    assert same(before, step)


def test_what_is_inserted_at_one_place_keeps_its_order(step: Step) -> None:
    """Earlier insertions stay in front; the end of the step is a place too."""
    draft = Draft(step)
    draft.insert_ops(row("first"), before=0)
    draft.insert_ops(row("second"), before=0)
    draft.insert_ops(row("last"), before=3)
    assert list(draft.build().ops.name) == ["first", "second", "one", "two", "three", "last"]


def test_operators_are_removed_with_what_they_did(step: Step) -> None:
    """Uses, saved rows and links to the operator go with it."""
    draft = Draft(step)
    draft.remove_storages(np.array([1]))
    draft.remove_ops(np.array([0]))
    built = draft.build()
    assert list(built.ops.name) == ["two", "three"]
    assert built.ops.forward_op_id.tolist() == [NONE, NONE]
    assert len(built.saved) == 0
    assert built.uses.storage_id.tolist() == [1, 1]
    assert built.storages.allocated_bytes.tolist() == [100, 30]


def test_a_draft_that_contradicts_itself_is_refused(step: Step) -> None:
    """A storage freed before its maker runs is a fault of the policy, said where it arises."""
    draft = Draft(step)
    draft.storages = draft.storages.replace(freed_op_id=np.array([NONE, 2, 0]))
    with pytest.raises(InvariantError):
        draft.build()


def test_module_calls_hold_what_they_held(step: Step) -> None:
    """What is inserted inside a call belongs to it, what is inserted at its edges does not."""
    calls = step.module_calls
    if not len(calls):
        pytest.fail("the step was built without module calls")
    draft = Draft(step)
    draft.insert_ops(row("before"), before=0)
    draft.insert_ops(row("inside"), before=1)
    draft.insert_ops(row("after"), before=2)
    built = draft.build()
    names = [built.ops.name[built.module_calls.first_op_id[0]], built.ops.name[built.module_calls.last_op_id[0]]]
    assert names == ["one", "two"]
