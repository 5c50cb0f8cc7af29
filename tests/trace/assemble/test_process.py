"""From one process's raw recording to the tables of a trace."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given

from memprof.replay.live import live_bytes
from memprof.trace.assemble import assemble_devices
from memprof.trace.files.spool import BACKWARD, FLAG_VIEW, GRADIENT, INPUT, OPTIMIZER, OPTIMIZER_STATE, OTHER, PARAMETER
from memprof.trace.manifest import Capture
from memprof.trace.schema import (
    ELSEWHERE,
    NONE,
    AllocatorEvents,
    Memory,
    ModuleCalls,
    Modules,
    Ops,
    Saved,
    Steps,
    Storages,
    Table,
    Uses,
)
from memprof.trace.store import Trace
from tests.trace.assemble.conftest import Assembled, Moments, RawJob, jobs

T = TypeVar("T", bound=Table)

X, W, Y, G = 100, 200, 300, 400  # addresses of input, weight, output, gradient


def table(assembled: Assembled, kind: type[T]) -> T:
    found = assembled[1][kind]
    assert isinstance(found, kind)
    return found


def trace_of(assembled: Assembled) -> Trace:
    return Trace.of([assembled], Path("made-by-hand.memprof"))


def linear_step(job: RawJob) -> None:
    """Writes y = x @ w, the gradient of w, and the update: 64 bytes of x, 32 each of w and g, 16 of y."""
    job.modules = [[0, "", "Net", -1, 0], [0, "fc", "Linear", 0, 32]]
    job.stacks = [[-1, ["train.py:9:main"]], [0, ["model.py:3:forward"]]]
    job.rows["alive"] = [[1, X, 64], [1, W, 32]]
    job.fact(2, W, PARAMETER, "fc.weight", module=1)
    job.fact(2, X, INPUT)
    job.rows["calls"] = [[0, 0, -1, 0, 1, 5, 35, 0], [1, 1, 0, 0, 1, 6, 30, 0]]
    job.operator(10, 20, reads=[X, W], writes=[Y], sequence=1, module=1, call=1, stack=1, flops=128)
    job.event(12, Y, 16, 112)
    job.event(13, 900, 40, 152)  # the kernel's own
    job.event(14, 900, -40, 112)
    job.operator(40, 50, reads=[Y, X], writes=[G], sequence=1, node_sequence=0, phase=BACKWARD)
    job.event(41, G, 32, 144)
    job.event(55, Y, -16, 128)
    job.operator(60, 70, "aten.add_.Tensor", reads=[G], mutates=[W], sequence=1, phase=OPTIMIZER, stack=0)
    job.fact(59, G, GRADIENT, "fc.weight", module=1)
    job.event(75, G, -32, 96)


def test_a_step_written_by_hand(raw_job: RawJob) -> None:
    """Operators, storages, their uses, what was saved and the counter of one small step, all worked out by hand."""
    linear_step(raw_job)
    assembled = raw_job.assemble()
    ops, storages, uses = table(assembled, Ops), table(assembled, Storages), table(assembled, Uses)

    assert list(ops.phase) == ["forward", "backward", "optimizer"]
    assert ops.module_id.tolist() == [1, 1, NONE]  # backward is where its forward ran
    assert ops.forward_op_id.tolist() == [NONE, 0, NONE]
    assert ops.stack_id.tolist() == [1, 1, 0]
    assert ops.flops.tolist() == [128, 0, 0]
    assert ops.workspace_bytes.tolist() == [40, 0, 0]

    assert list(storages.category) == ["input", "parameter", "activation", "gradient"]
    assert list(storages.name) == ["", "fc.weight", "", "fc.weight"]
    assert storages.module_id.tolist() == [NONE, 1, 1, 1]
    assert storages.allocated_bytes.tolist() == [64, 32, 16, 32]
    assert storages.created_op_id.tolist() == [NONE, NONE, 0, 1]
    assert storages.freed_op_id.tolist() == [NONE, NONE, 1, 2]
    assert list(storages.shape) == ["2x4"] * 4

    rows = list(zip(uses.op_id.tolist(), uses.storage_id.tolist(), uses.role, strict=True))
    assert rows == [
        (0, 0, "read"),
        (0, 1, "read"),
        (0, 2, "write"),
        (1, 0, "read"),
        (1, 2, "read"),
        (1, 3, "write"),
        (2, 1, "mutate"),
        (2, 3, "read"),
    ]
    saved = table(assembled, Saved)
    kept = zip(saved.storage_id.tolist(), saved.forward_op_id.tolist(), saved.released_op_id.tolist(), strict=True)
    assert sorted(kept) == [(0, 0, 1), (2, 0, 1)]
    # 64 + 32, the result 16 and the kernel's 40; then the gradient on top of 112; then all but y.
    assert table(assembled, Memory).allocated_bytes.tolist() == [152, 144, 128]
    trace_of(assembled).step(0).check()


def test_modules_and_their_calls(raw_job: RawJob) -> None:
    """Calls are listed in order of entry with the operators inside, whichever of them ended first."""
    linear_step(raw_job)
    assembled = raw_job.assemble()
    assert list(table(assembled, Modules).name) == ["", "fc"]
    calls = table(assembled, ModuleCalls)
    assert calls.module_id.tolist() == [0, 1]
    assert calls.parent_call_id.tolist() == [NONE, 0]
    assert calls.first_op_id.tolist() == [0, 0]
    assert calls.last_op_id.tolist() == [0, 0]


def test_the_allocators_events_are_told_with_their_operators(raw_job: RawJob) -> None:
    """Each with the operator that ran, or the last before."""
    linear_step(raw_job)
    events = table(raw_job.assemble(), AllocatorEvents)
    assert list(events.action) == ["alloc", "alloc", "free", "alloc", "free", "free"]
    assert events.size_bytes.tolist() == [16, 40, 40, 32, 16, 32]
    assert events.op_id.tolist() == [0, 0, 0, 1, 1, 2]


def test_nothing_is_made_of_a_recording_without_operators(raw_job: RawJob) -> None:
    """A process that imported torch and trained nothing has no trace."""
    raw_job.event(5, X, 64, 64)
    raw_job.write()
    assert assemble_devices(raw_job.folder, {}, None) == []


def test_operators_after_the_last_heard_event_are_left_out(raw_job: RawJob) -> None:
    """A killed job loses its last events: the trace ends at the last memory event, and says so."""
    linear_step(raw_job)
    raw_job.end = None
    raw_job.event(56, 0, 0)
    assembled = raw_job.assemble({"returncode": -9})
    assert list(table(assembled, Ops).phase) == ["forward", "backward"]
    assert table(assembled, Steps).is_complete.tolist() == [False]
    assert assembled[0].capture == Capture(
        is_complete=False, ends_at="step 0, backward of fc", reason="the job was killed by SIGKILL", exit_status=-9
    )
    trace_of(assembled).step(0).check()


@pytest.mark.parametrize(
    ("end", "fault", "exit_record", "reason"),
    [
        (None, None, {"returncode": -15}, "the job was killed by SIGTERM"),
        (None, None, {"returncode": 0}, "the job ended without leaving Python in order"),
        (None, None, None, "the job is still running"),
        (None, None, {}, "the job ended without finishing its recording"),
        (None, "Traceback ...\nOSError: No space left on device\n", {"returncode": 0}, "No space left on device"),
    ],
)
def test_a_recording_that_ends_early_says_why(
    raw_job: RawJob, end: str | None, fault: str | None, exit_record: dict[str, int] | None, reason: str
) -> None:
    """Killed, left by os._exit, under way, or given up by the recorder itself."""
    linear_step(raw_job)
    raw_job.event(80, 0, 0)
    raw_job.end = end
    raw_job.faults = [fault] if fault else []
    capture = raw_job.assemble(exit_record)[0].capture
    assert not capture.is_complete
    assert reason in capture.reason


def test_a_recording_that_reached_the_end_of_its_window_is_complete(raw_job: RawJob) -> None:
    """With the job's own status."""
    linear_step(raw_job)
    capture = raw_job.assemble({"returncode": 3})[0].capture
    assert (capture.is_complete, capture.reason, capture.exit_status) == (True, "the window is over", 3)


def test_memory_between_operators_has_a_row_in_the_module_around_it(raw_job: RawJob) -> None:
    """A compiled model's memory comes and goes without operators: rows named so, in the module called."""
    raw_job.modules = [[0, "", "OptimizedModule", -1, 8], [0, "_orig_mod", "Net", 0, 8]]
    raw_job.rows["calls"] = [[0, 0, -1, 1, 1, 25, 55, 0], [1, 1, 0, 1, 1, 40, 45, 0]]
    raw_job.operator(10, 20)
    raw_job.event(30, Y, 64, 72)
    raw_job.event(35, Y, -64, 8)
    raw_job.event(42, Y, 32, 40)
    raw_job.event(43, Y, -32, 8)
    raw_job.event(57, Y, 16, 24)
    raw_job.event(58, Y, -16, 8)
    raw_job.operator(60, 70)
    assembled = raw_job.assemble()
    ops = table(assembled, Ops)
    assert list(ops.kind) == ["compute", "allocation", "allocation", "allocation", "compute"]
    assert list(ops.name)[1:4] == ["compiled region", "allocation between operators", "allocation between operators"]
    assert ops.module_id.tolist() == [NONE, 0, 1, NONE, NONE]
    assert np.isnan(ops.duration_us).tolist() == [False, True, True, True, False]
    step = trace_of(assembled).step(0)
    step.check()
    assert (live_bytes(step).during - step.bytes_at_start()).tolist() == [0, 64, 32, 16, 0]


def summed_gradients(job: RawJob, *, nodes: tuple[int, int, int]) -> Assembled:
    """Assembles a backward pass in which a third node adds what two made: a (100) + b (200) into r (300)."""
    first, second, third = nodes
    for place, sequence in enumerate((1, 2, 3)):
        job.operator(10 * place, 10 * place + 5, sequence=sequence)
    job.operator(40, 49, writes=[100], sequence=3, node_sequence=first, phase=BACKWARD)
    job.event(41, 100, 64, 64)
    job.operator(50, 59, writes=[200], sequence=3, node_sequence=second, phase=BACKWARD)
    job.event(51, 200, 64, 128)
    added = job.operator(
        60, 69, "aten.add.Tensor", reads=[100, 200], writes=[300], sequence=3, node_sequence=second, phase=BACKWARD
    )
    assert added == 5
    job.event(61, 300, 64, 192)
    job.event(70, 100, -64, 128)
    job.event(71, 200, -64, 64)
    job.operator(80, 89, reads=[300], sequence=3, node_sequence=third, phase=BACKWARD)
    job.event(95, 300, -64, 0)
    return job.assemble()


def test_autograds_sum_of_gradients_is_in_place(raw_job: RawJob) -> None:
    """Without the recorder, the engine adds b into a: no third block of 64 bytes, and a lasts as long as the sum."""
    assembled = summed_gradients(raw_job, nodes=(2, 1, 0))
    storages = table(assembled, Storages)
    assert storages.created_op_id.tolist() == [3, 4]
    assert storages.freed_op_id.tolist() == [6, 5]
    assert table(assembled, Memory).allocated_bytes.tolist() == [0, 0, 0, 64, 128, 128, 64]
    trace_of(assembled).step(0).check()


def test_a_sum_within_one_backward_formula_is_left(raw_job: RawJob) -> None:
    """Terms of the node that adds them: the formula's own addition takes new memory, recorder or not."""
    assembled = summed_gradients(raw_job, nodes=(1, 1, 1))
    assert table(assembled, Memory).allocated_bytes.tolist() == [0, 0, 0, 64, 128, 192, 64]
    trace_of(assembled).step(0).check()


def test_memory_of_other_threads_is_unknown_and_told(raw_job: RawJob) -> None:
    """The allocator counts 1000 bytes without an event: a storage that says so, and a note."""
    raw_job.operator(10, 20, writes=[Y])
    raw_job.event(12, Y, 8, 8)
    raw_job.operator(30, 40, writes=[G])
    raw_job.event(32, G, 8, 1016)
    assembled = raw_job.assemble()
    storages = table(assembled, Storages)
    assert list(storages.category)[-1] == "unknown"
    assert list(storages.name)[-1] == ELSEWHERE
    assert storages.allocated_bytes.tolist() == [8, 8, 1000]
    assert table(assembled, Memory).allocated_bytes.tolist() == [8, 1016]
    assert "other threads took 1,000 bytes" in "".join(assembled[0].notes)


def test_the_count_of_a_recorder_that_came_late_is_not_used(raw_job: RawJob) -> None:
    """It began at zero when the recorder came, and is no count of all memory."""
    linear_step(raw_job)
    raw_job.is_late = True
    raw_job.rows["events"] = [[*row[:3], row[3] - 96] for row in raw_job.rows["events"]]
    assembled = raw_job.assemble()
    assert table(assembled, Memory).allocated_bytes.tolist() == [152, 144, 128]
    assert len(table(assembled, Storages)) == 4


def test_foreign_memory_takes_none_of_the_allocators(raw_job: RawJob) -> None:
    """A numpy array is a storage of 800 bytes asked for, and 0 of the allocator's."""
    raw_job.operator(10, 20, reads=[7000], size=800)
    storages = table(raw_job.assemble(), Storages)
    assert storages.requested_bytes.tolist() == [800]
    assert storages.allocated_bytes.tolist() == [0]
    assert list(storages.category) == ["input"]


def test_operators_take_their_times_from_the_timed_step(raw_job: RawJob) -> None:
    """3 us instead of the 10 ns recorded; the manifest names the step that was timed."""
    linear_step(raw_job)
    raw_job.step(0, "recorded", 0, 80, 0, 3)
    raw_job.step(1, "timed", 80, 900, 3, 3)
    mm, add = raw_job.text("aten::mm"), raw_job.text("aten::add_")
    raw_job.rows["times"] = [[mm, 100, 3000, 0], [mm, 200, 5000, 0], [add, 300, 1000, 0]]
    assembled = raw_job.assemble()
    assert table(assembled, Ops).duration_us.tolist() == [3.0, 5.0, 1.0]
    assert assembled[0].op_times == "timed step 1"


def test_without_a_timed_step_the_modes_cost_is_taken_off(raw_job: RawJob) -> None:
    """The view takes 2 us under the mode, so an operator of 10 us takes 8; the manifest says how that is known."""
    raw_job.operator(0, 10_000)
    raw_job.operator(20_000, 22_000, "aten.view.default", flags=FLAG_VIEW)
    assembled = raw_job.assemble()
    assert table(assembled, Ops).duration_us.tolist() == [8.0, 0.0]
    assert assembled[0].op_times == "recorded step, dispatch cost taken off"


def test_a_model_that_only_infers_runs_forward(raw_job: RawJob) -> None:
    """No gradient is on, so no operator announces a phase: those inside a model's call are forward."""
    raw_job.modules = [[0, "", "Net", -1, 8]]
    raw_job.operator(10, 20, phase=OTHER)
    raw_job.operator(30, 40, phase=OTHER, call=0, module=0)
    assert list(table(raw_job.assemble(), Ops).phase) == ["other", "forward"]


def test_names_carry_the_model_where_there_are_several(raw_job: RawJob) -> None:
    """Two models of a type: parameters, state and buffers are distinguished by their model's name."""
    raw_job.modules = [[0, "", "Net", -1, 8], [1, "", "Net", -1, 8]]
    raw_job.rows["alive"] = [[1, W, 32], [1, X, 32]]
    raw_job.fact(2, W, PARAMETER, "weight", module=1)
    raw_job.fact(2, X, OPTIMIZER_STATE, "weight.exp_avg", module=0)
    raw_job.operator(10, 20, reads=[W, X])
    assert sorted(table(raw_job.assemble(), Storages).name) == ["Net#2.weight", "Net.weight.exp_avg"]


def test_resident_memory_is_told_where_it_was_sampled(raw_job: RawJob) -> None:
    """With the operator that was next; none elsewhere."""
    raw_job.operator(10, 20)
    raw_job.operator(30, 40)
    raw_job.rows["rss"] = [[25, 1, 4096]]
    assert table(raw_job.assemble(), Memory).host_rss_bytes.tolist() == [NONE, 4096]


@given(jobs())
def test_any_recording_makes_a_sound_step(job: Moments) -> None:
    """Whatever operators and allocator did: the step checks, and no byte of the events is lost."""
    with tempfile.TemporaryDirectory() as folder:
        raw = RawJob(Path(folder))
        raw.rows["alive"] = [[0, address, size] for address, size in job.alive.items()]
        for start, end in job.operators:
            raw.operator(start, end, reads=range(1, 7), writes=[1])
        total = 2**42 + sum(job.alive.values())  # other memory that was there before, and stays
        for moment, address, size in job.events:
            total += size
            raw.event(moment, address, size, total)
        raw.step(0, "recorded", 0, 100, 0, len(job.operators))
        assembled = raw.assemble()
    step = trace_of(assembled).step(0)
    step.check()
    others = 2**42 if job.events else 0
    assert live_bytes(step).after[-1] == sum(job.alive.values()) + sum(size for *_, size in job.events) + others
