"""Rewriting steps, and when the nodes of autograd's graph run in backward."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import InvariantError
from memprof.policies.checkpoint.nodes import find_nodes
from memprof.policies.rewrite.draft import Draft, find_spans
from memprof.policies.rewrite.insertion import new_ops
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
        for field in getattr(one, table).columns()
        for equal_nan in [getattr(getattr(one, table), field.name).dtype.kind == "f"]
    )


@given(jobs())
def test_an_unchanged_draft_is_the_step(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """Only the recorded counters are dropped, since the new step was not measured."""
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


def test_storages_are_removed_with_what_used_and_saved_them(step: Step) -> None:
    """Operators stay; ids of the storages that are left are dense again."""
    draft = Draft(step)
    draft.remove_storages(np.array([1]))
    built = draft.build()
    assert list(built.ops.name) == list(step.ops.name)
    assert 1 not in built.storage_ids
    assert built.storages.allocated_bytes.tolist() == [100, 30]
    assert len(built.uses) == np.count_nonzero(step.uses.storage_id != 1)
    assert len(built.saved) == np.count_nonzero(step.saved.storage_id != 1)


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


def uses_of(step: Step, name: str) -> list[tuple[int, str]]:
    """Lists what the operators of a name use, as bytes of the storage and role."""
    rows = np.flatnonzero(step.ops.name[step.uses.op_id] == name)
    sizes = step.storages.allocated_bytes[step.uses.storage_id[rows]]
    return list(zip(sizes.tolist(), step.uses.role[rows].tolist(), strict=True))


def test_repeats_belong_to_what_they_interrupt(step: Step) -> None:
    """A repeat keeps its name and time, but is recomputation of the phase that it runs in; so at the step's end."""
    draft = Draft(step)
    ids = draft.repeat_ops(np.array([0, 1]), np.array([2, 3]))
    assert ids.tolist() == [3, 4]
    built = draft.build()
    assert list(built.ops.name) == ["one", "two", "one", "three", "two"]
    assert list(built.ops.phase) == ["forward", "forward", "backward", "backward", "backward"]
    assert built.ops.is_recompute.tolist() == [False, False, True, False, True]
    assert built.ops.forward_op_id.tolist() == [NONE, NONE, NONE, 0, NONE]
    assert uses_of(built, "one") == [(20, "write")]


def test_repeats_are_of_the_micro_batch_they_interrupt() -> None:
    """What is run again for the second micro-batch counts as its work."""
    draft = Draft(make_step([Op(name="one"), Op(name="two", micro_batch=1)], []))
    draft.repeat_ops(np.array([0]), np.array([1]))
    assert draft.build().ops.micro_batch.tolist() == [0, 1, 1]


def test_new_operators_are_of_the_phase_they_come_before(step: Step) -> None:
    """At the end of the step they are of the last operator's; columns that are not given have no value."""
    rows = new_ops(step, "new", np.array([1, 2, 3]), kind="copy", duration_us=np.array([1.0, 2.0, 3.0]))
    assert list(rows.phase) == ["forward", "backward", "backward"]
    assert list(rows.kind) == ["copy"] * 3
    assert rows.module_id.tolist() == rows.forward_op_id.tolist() == [NONE] * 3
    draft = Draft(step)
    draft.insert_ops(rows, np.array([1, 2, 3]))
    assert list(draft.build().ops.name) == ["one", "new", "two", "new", "three", "new"]


def test_copies_use_what_their_operators_use(step: Step) -> None:
    """Every use comes again, in the order of the copies, each with its role."""
    draft = Draft(step)
    ids = draft.repeat_ops(np.array([1, 0]), np.array([2, 2]))
    draft.copy_uses(np.array([1, 0]), ids)
    built = draft.build()
    assert list(built.ops.name) == ["one", "two", "two", "one", "three"]
    assert uses_of(built, "two") == [(20, "read"), (30, "write")] * 2
    assert uses_of(built, "one") == [(20, "write")] * 2


def test_readers_from_an_operator_on_use_another_storage(step: Step) -> None:
    """Before it nothing changes; what was inserted before it does not change either, what comes after it does."""
    draft = Draft(step)
    early = draft.insert_ops(row("early"), before=2)
    made = draft.insert_ops(row("made"), before=2)
    late = draft.insert_ops(row("late"), before=2)
    a = np.array([1])
    copy_of_a = draft.copy_storages(a, made, np.array([2]))
    for op in (early, late):
        draft.use(op, a, "read")
    draft.redirect_uses(a, copy_of_a, made)
    copied = {op for op, storage in zip(draft.uses.op_id, draft.uses.storage_id, strict=True) if storage == copy_of_a}
    assert copied == {2, late[0]}
    draft.build()


@given(data=st.data())
def test_of_spans_the_one_that_begins_last_counts(data: st.DataObject) -> None:
    """Spans of storages, overlapping in any way, found all at once and one by one."""
    ids, moments = st.integers(0, 3), st.integers(-1, 9)
    spans = data.draw(st.lists(st.tuples(ids, st.integers(0, 9), st.integers(0, 9)), unique_by=lambda one: one[:2]))
    wanted = data.draw(st.lists(st.tuples(ids, moments)))
    of, first, last = np.array(spans, dtype=np.int64).reshape(-1, 3).T
    storages, at = np.array(wanted, dtype=np.int64).reshape(-1, 2).T
    found = find_spans(storages, at, of=of, first=first, last=last)
    for storage, moment, row in zip(storages, at, found, strict=True):
        begun = [(one[1], number) for number, one in enumerate(spans) if one[0] == storage and one[1] <= moment]
        latest = max(begun, default=(0, NONE))[1]
        assert row == (latest if latest != NONE and spans[latest][2] >= moment else NONE)


@pytest.fixture
def long_step() -> Step:
    """Reads a (20 bytes) in operators 1, 4 and 7; it is saved by the first and freed after the last."""
    ops = [Op(name="make", makes=["a"], saves=["a"])]
    ops += [Op(name=f"op{number}", reads=["a"] if number in (1, 4, 7) else []) for number in range(1, 7)]
    ops.append(Op(name="last", phase="backward", reads=["a"], frees=["a"], forward=0))
    return make_step(ops, [Storage("a", 20)])


def test_a_storage_leaves_memory_twice(long_step: Step) -> None:
    """It is gone between its readers, each of which reads what was there then; autograd keeps none of it."""
    draft = Draft(long_step)
    back = draft.insert_ops(Ops.of(op_id=[0, 0], name=["back", "back"]), np.array([7, 4]))
    a = np.array([0, 0])
    copies = draft.split_lives(a, np.array([5, 1]), back)
    assert len(np.unique(copies)) == 2
    built = draft.build()
    assert list(built.ops.name) == ["make", "op1", "op2", "op3", "back", "op4", "op5", "op6", "back", "last"]
    assert live_bytes(built).during.tolist() == [20, 20, 0, 0, 20, 20, 20, 0, 20, 20]
    assert built.uses.storage_id.tolist() == [0, 0, 1, 1, 2, 2]
    assert built.uses.role.tolist() == ["write", "read", "write", "read", "write", "read"]
    assert len(built.saved) == 0


def test_a_copy_may_outlive_the_storage_it_is_of(long_step: Step) -> None:
    """Its end can be given, also as none: then it outlives the step."""
    draft = Draft(long_step)
    back = draft.insert_ops(row("back"), before=7)
    draft.split_lives(np.array([0]), np.array([5]), back, np.array([NONE]))
    assert draft.build().storages.freed_op_id.tolist() == [5, NONE]


def test_what_is_freed_and_kept_can_be_changed(step: Step) -> None:
    """Other storages keep their ends and their places among saved tensors."""
    draft = Draft(step)
    draft.free(np.array([2]), NONE)
    draft.unsave(np.array([2]))
    assert draft.storages.freed_op_id.tolist() == [NONE, 2, NONE]
    assert draft.saved.storage_id.tolist() == [1]
    draft.unsave(np.array([1]))
    assert len(draft.saved) == 0


def moments(*backward: str) -> tuple[int, ...]:
    """Returns first, returned, released and last of the node that runs these operators after two of forward.

    Operators are counted from the node's first one.
    """
    names = ("aten.mul.Tensor", "aten.mm.default")
    ops = [*map(Op, names), *(Op(f"aten.{name}", "backward", forward=0) for name in backward)]
    found = find_nodes(make_step(ops, []))
    assert all(values[1] == NONE for values in (found.first, found.returned, found.released, found.last))
    return tuple(int(values[0]) - len(names) for values in (found.first, found.returned, found.released, found.last))


@pytest.mark.parametrize(
    ("backward", "expected"),
    [
        (["mul.Tensor"], (0, 0, 0, 0)),
        (["mul.Tensor", "mul.Tensor"], (0, 1, 1, 1)),
        # Sums of gradients run after the saved tensors are released.
        (["mul.Tensor", "add.Tensor"], (0, 0, 0, 1)),
        (["mul.Tensor", "mul.Tensor", "add_.Tensor", "add.Tensor"], (0, 1, 1, 3)),
        # A node that only adds is its own function.
        (["add.Tensor"], (0, 0, 0, 0)),
        # Reductions to a broadcast operand's size run after the function, and before the release.
        (["mul.Tensor", "sum.dim_IntList"], (0, 0, 1, 1)),
        (["mul.Tensor", "sum.dim_IntList", "view.default"], (0, 0, 2, 2)),
        (["mul.Tensor", "_to_copy.default", "add.Tensor"], (0, 0, 1, 2)),
        (["mul.Tensor", "sum.dim_IntList", "view.default", "sum.dim_IntList", "add_.Tensor"], (0, 0, 3, 4)),
        # A view without a reduction before it belongs to the function.
        (["mul.Tensor", "view.default"], (0, 1, 1, 1)),
        (["sum.dim_IntList", "view.default"], (0, 1, 1, 1)),
    ],
)
def test_moments_of_a_node(backward: list[str], expected: tuple[int, ...]) -> None:
    """First operator, last of its function, last before the release, last of all."""
    assert moments(*backward) == expected
