"""A step cut out of a trace, and its invariants."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given

from memprof.errors import InvariantError, UsageError
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, Memory, Ops, Steps, Storages
from memprof.trace.store import Trace
from tests.building import Op, Storage, make_step, make_tables, make_trace
from tests.strategies import jobs


def crossing_job() -> tuple[list[list[Op]], list[Storage]]:
    """Three steps; ``old`` dies in the first, ``carried`` lives from the first into the second, ``late`` is last's."""
    steps = [
        [Op(makes=["carried"], reads=["weight"]), Op(reads=["old"], frees=["old"])],
        [Op(reads=["carried"], makes=["inside"]), Op(reads=["inside"], forward=0, frees=["carried", "inside"]), Op()],
        [Op(makes=["late"])],
    ]
    storages = [Storage("weight", 64, "parameter"), Storage("old", 8), Storage("carried", 16), Storage("inside", 4)]
    return steps, [*storages, Storage("late", 2)]


def test_ids_of_a_cut_step_are_its_own_rows() -> None:
    """Operators and storages of a step in the middle count from 0, and first_op_id and storage_ids lead back."""
    step = make_trace(*crossing_job()).step(1)
    assert step.first_op_id == 2
    assert step.ops.op_id.tolist() == [0, 1, 2]
    # In the trace: weight 0, old 1 (alive from before), carried 2, inside 3, late 4.
    assert step.storage_ids.tolist() == [0, 2, 3]
    assert step.storages.storage_id.tolist() == [0, 1, 2]
    assert step.storages.created_op_id.tolist() == [NONE, NONE, 0]
    assert step.storages.freed_op_id.tolist() == [NONE, 1, 1]
    assert list(zip(step.uses.op_id.tolist(), step.uses.storage_id.tolist(), step.uses.role, strict=True)) == [
        (0, 1, "read"),
        (0, 2, "write"),
        (1, 2, "read"),
    ]
    assert step.ops.forward_op_id.tolist() == [NONE, 0, NONE]
    step.check()


def test_what_is_freed_after_the_last_operator_dies_in_the_step() -> None:
    """A storage freed between the step's last operator and the next step ends in the step; a later one outlives it."""
    step = make_trace(*crossing_job()).step(0)
    assert step.storage_ids.tolist() == [0, 1, 2]
    assert step.storages.freed_op_id.tolist() == [NONE, 1, NONE]
    step.check()


def test_module_calls_are_rebased() -> None:
    """Calls of the second step point to its own operators and to each other."""
    ops = [Op(module="net.first"), Op(module="net.second"), Op(phase="backward", module="net.second")]
    step = make_trace([ops, ops], []).step(1)
    names = [step.modules.name[module] for module in step.module_calls.module_id]
    assert names == ["", "net", "net.first", "net.second"]
    assert step.module_calls.parent_call_id.tolist() == [NONE, 0, 1, 1]
    assert step.module_calls.first_op_id.tolist() == [0, 0, 0, 1]
    assert step.module_calls.last_op_id.tolist() == [1, 1, 0, 1]
    step.check()


def test_saved_points_into_the_step() -> None:
    """What forward saves names the step's own storages and operators, in every step."""
    trace = make_trace([[Op(makes=["y"], saves=["x"]), Op(reads=["x"], forward=0, frees=["y"])]] * 2, two_storages())
    for number in (0, 1):
        step = trace.step(number)
        assert (step.saved.storage_id.tolist(), step.saved.forward_op_id.tolist()) == ([0], [0])
        assert step.saved.released_op_id.tolist() == [1]


def two_storages() -> list[Storage]:
    return [Storage("x", 100, "input"), Storage("y", 30)]


def test_storages_come_in_order_of_birth() -> None:
    """Storages are sorted by the operator that makes them even where the trace's ids are not."""
    tables = make_tables(*crossing_job())
    tables[Storages] = tables[Storages].take(slice(None, None, -1))
    step = Trace.of([(Manifest(), tables)], "backwards").step(1)
    assert step.storage_ids.tolist() == [0, 2, 3]
    assert step.uses.storage_id.tolist() == [1, 2, 2]


def test_duration_is_that_of_the_untouched_steps() -> None:
    """The recorder's own cost is not in a step's duration where the trace has plain steps: their median counts."""
    trace = make_trace(
        [[Op()], [], [], []],
        [],
        kinds=["recorded", "plain", "plain", "plain"],
        durations_us=[900.0, 100.0, 700.0, 120.0],
    )
    assert trace.step(0).duration_us == 120.0
    assert make_trace([[Op()]], [], durations_us=[900.0]).step(0).duration_us == 900.0


def test_unknown_steps_are_refused_with_those_there_are() -> None:
    """Asking for a step without recorded operators lists the steps that have them."""
    trace = make_trace([[Op()], [Op()], []], [], kinds=["warm_up", "recorded", "plain"])
    with pytest.raises(UsageError, match=r"no operators of step 2; recorded steps: 0, 1\."):
        trace.step(2)
    with pytest.raises(UsageError, match="no step of it was recorded"):
        make_trace([[]], []).step(0)


@pytest.mark.parametrize(
    ("table", "columns", "sentence"),
    [
        ("ops", {"op_id": [0, 2]}, "operators are not numbered"),
        ("ops", {"module_id": [5, NONE]}, "operator 0 is of a module that does not exist"),
        ("ops", {"forward_op_id": [0, NONE]}, "operator 0 belongs to a forward operator after it"),
        ("ops", {"stack_id": [NONE, 3]}, "operator 1 has a stack that does not exist"),
        ("ops", {"workspace_bytes": [0, 1]}, "operator 1 (aten.mul.Tensor) the replay holds 131 bytes and the"),
        ("storages", {"storage_id": [1, 0]}, "storages are not numbered"),
        ("storages", {"created_op_id": [NONE, 2]}, "storage 1 is made by an operator that does not exist"),
        ("storages", {"created_op_id": [NONE, 1], "freed_op_id": [NONE, 0]}, "storage 1 is freed before it is made"),
        ("storages", {"freed_op_id": [0, 1]}, "use 1 is of a storage that is not alive then"),
        ("storages", {"created_op_id": [0, NONE]}, "not in order of birth"),
        ("storages", {"allocated_bytes": [-1, 30]}, "storage 0 has fewer than 0 bytes"),
        ("storages", {"allocated_bytes": [101, 30]}, "holds 131 bytes and the allocator counted 130"),
        ("uses", {"storage_id": [1, 2]}, "use 1 is of a storage that does not exist"),
        ("uses", {"storage_id": [1, NONE]}, "use 1 is of a storage that does not exist"),
        ("saved", {"forward_op_id": [9]}, "saved row 0 is by an operator that does not exist"),
        ("memory", {"op_id": [0, 2]}, "counter sample 1 is of an operator that does not exist"),
    ],
)
def test_check_names_what_is_broken(table: str, columns: dict[str, list[int]], sentence: str) -> None:
    """A step that contradicts itself is refused with the first promise it breaks."""
    step = make_step([Op(makes=["y"], saves=["x"]), Op(reads=["x"], forward=0, frees=["y"])], two_storages())
    step.check()
    changed = getattr(step, table).replace(**{name: np.array(values) for name, values in columns.items()})
    with pytest.raises(InvariantError, match=re.escape(sentence)):
        dataclasses.replace(step, **{table: changed}).check()


def test_a_step_without_counters_is_checked_too() -> None:
    """A predicted step has no counters to compare with; the rest of its promises hold all the same."""
    step = make_step([Op(makes=["y"], frees=["y"])], two_storages())
    dataclasses.replace(step, memory=Memory.empty()).check()


def test_samples_of_several_devices_add_up() -> None:
    """Where an operator has a counter sample for each device, the replayed bytes equal their sum."""
    step = make_step([Op(makes=["y"])], two_storages())
    memory = Memory.of(op_id=[0, 0], device=["cpu", "cuda:0"], allocated_bytes=[100, 30])
    dataclasses.replace(step, memory=memory).check()


@given(jobs())
def test_every_step_of_any_job_passes_its_check(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """Cutting any step out of any job gives a step that keeps every promise, the recorded counters to the byte."""
    trace = make_trace(*job)
    for number in trace.recorded_steps:
        trace.step(number).check()


@given(jobs())
def test_steps_share_out_the_trace(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """Every operator is in exactly one step, and every storage is in each step its life touches."""
    trace = make_trace(*job)
    steps = [trace.step(number) for number in trace.recorded_steps]
    assert sum(len(step.ops) for step in steps) == len(trace.table(Ops))
    table, bounds = trace.table(Storages), trace.table(Steps)
    for row, step in enumerate(steps):
        first, last = bounds.first_op_id[row], bounds.last_op_id[row]
        touching = [
            storage
            for storage, created, freed in zip(table.storage_id, table.created_op_id, table.freed_op_id, strict=True)
            if created <= last and (freed == NONE or freed >= first)
        ]
        assert sorted(step.storage_ids) == touching
