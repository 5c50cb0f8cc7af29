"""The part of a recording to keep and its steps, and names, stacks, tensors and modules by number."""

from __future__ import annotations

from typing import Any

import numpy as np

from memprof.trace.assemble.steps import choose_epoch, last_event_ns, number_steps, step_table
from memprof.trace.assemble.texts import look_up, module_table, stack_table, tensor_kinds
from memprof.trace.files.spool import Spool
from memprof.trace.schema import NONE, Steps
from tests.trace.assemble.conftest import RawJob


def run_operators(job: RawJob, count: int) -> None:
    for number in range(count):
        job.operator(100 * number, 100 * number + 50)


def test_the_stretch_with_most_recorded_steps_is_told(raw_job: RawJob) -> None:
    """Recording paused twice: the stretch with two recorded steps is chosen, not the warm-up nor the one with one."""
    run_operators(raw_job, 8)
    raw_job.epochs = [{"op": op, "time_ns": 100 * op, "source": "native"} for op in (0, 4, 6)]
    raw_job.step(0, "warm_up", 0, 100, 0, 1)
    raw_job.step(1, "warm_up", 100, 200, 1, 2)
    raw_job.step(2, "warm_up", 200, 300, 2, 4)
    raw_job.step(5, "recorded", 400, 500, 4, 5)
    raw_job.step(6, "recorded", 500, 600, 5, 6)
    raw_job.step(9, "recorded", 600, 800, 6, 8)
    epoch = choose_epoch(raw_job.write())
    assert epoch is not None
    assert (epoch.first_op, epoch.end_op, epoch.start_ns, epoch.end_ns) == (4, 6, 400, 600)


def test_of_equal_stretches_the_latest_is_told(raw_job: RawJob) -> None:
    """It is the nearest to the steady state; one that broke off does not count."""
    run_operators(raw_job, 3)
    raw_job.epochs = [{"op": op, "time_ns": 100 * op, "source": "native"} for op in (0, 1, 2)]
    raw_job.step(0, "recorded", 0, 100, 0, 1)
    raw_job.step(1, "recorded", 100, 200, 1, 2)
    raw_job.step(2, "recorded", 200, 300, 2, 3, is_complete=False)
    epoch = choose_epoch(raw_job.write())
    assert epoch is not None
    assert epoch.first_op == 1


def test_a_stretch_without_operators_is_not_told(raw_job: RawJob) -> None:
    """The job's own profiler took over before anything ran; where nothing ran at all, nothing is told."""
    assert choose_epoch(raw_job.write()) is None


def test_the_last_epoch_lasts(raw_job: RawJob) -> None:
    """Nothing that happens later ends it, and its source is told."""
    run_operators(raw_job, 1)
    raw_job.source = "dispatch"
    epoch = choose_epoch(raw_job.write())
    assert epoch is not None
    assert (epoch.end_op, epoch.end_ns, epoch.source) == (1, np.iinfo(np.int64).max, "dispatch")


def test_events_are_heard_up_to_the_last_mark(raw_job: RawJob) -> None:
    """A mark means that everything before it was received; a real event, or a mark of a later stretch, does not."""
    run_operators(raw_job, 2)
    raw_job.epochs = [{"op": 0, "time_ns": 0, "source": "native"}, {"op": 1, "time_ns": 100, "source": "native"}]
    raw_job.step(0, "recorded", 0, 100, 0, 1)
    raw_job.event(30, 0, 0)
    raw_job.event(60, 0, 0)
    raw_job.event(70, 4096, 8)
    raw_job.event(150, 0, 0)
    spool = raw_job.write()
    epoch = choose_epoch(spool)
    assert epoch is not None
    assert last_event_ns(spool, epoch) == 60


def test_operators_are_numbered_by_their_step(raw_job: RawJob) -> None:
    """Operators after the last complete step belong to the interrupted step."""
    run_operators(raw_job, 5)
    raw_job.step(3, "recorded", 0, 200, 0, 2)
    raw_job.step(4, "recorded", 200, 400, 2, 4)
    spool = raw_job.write()
    epoch = choose_epoch(spool)
    assert epoch is not None
    assert number_steps(spool, epoch).tolist() == [3, 3, 4, 4, 5]


def test_all_steps_are_listed(raw_job: RawJob) -> None:
    """Steps without operators have none; durations leave the recorder's pauses out (10 us less 2.5 us)."""
    run_operators(raw_job, 2)
    raw_job.step(0, "recorded", 0, 10_000, 0, 2, paused_ns=2500, updates=2, micro_batches=4)
    raw_job.step(1, "timed", 10_000, 12_000, 2, 2)
    steps = step_table(raw_job.write(), np.array([0, 0, 0]), np.array([True, False, True]))
    assert steps.step.tolist() == [0, 1]
    assert list(steps.kind) == ["recorded", "timed"]
    assert steps.start_us.tolist() == [0.0, 10.0]
    assert steps.duration_us.tolist() == [7.5, 2.0]
    assert steps.micro_batches.tolist() == [4, 1]
    assert steps.optimizer_updates.tolist() == [2, 1]
    assert steps.first_op_id.tolist() == [0, NONE]
    assert steps.last_op_id.tolist() == [2, NONE]


def broken_off(job: RawJob, window: dict[str, object]) -> Steps:
    """Returns the steps of a job that was killed in step 1, at the end of its fourth operator."""
    job.end = None
    job.window = window
    run_operators(job, 4)
    job.step(0, "warm_up", 0, 200, 0, 2)
    return step_table(job.write(), np.array([0, 0, 1, 1]), np.ones(4, dtype=np.bool_))


def test_the_step_a_job_was_killed_in_is_listed(raw_job: RawJob) -> None:
    """It begins where the one before ended, ends with the last operator seen, and is not complete."""
    steps = broken_off(raw_job, {"skip": 1, "steps": 3, "stop": False})
    assert steps.step.tolist() == [0, 1]
    assert list(steps.kind) == ["warm_up", "recorded"]
    assert steps.is_complete.tolist() == [True, False]
    assert steps.start_us.tolist() == [0.0, 0.2]
    assert steps.duration_us[1] == (350 - 200) / 1000
    assert (steps.first_op_id[1], steps.last_op_id[1]) == (2, 3)


def test_a_job_killed_before_its_window_was_warming_up(raw_job: RawJob) -> None:
    """The window says which kind of step the broken one was."""
    steps = broken_off(raw_job, {"skip": 2, "steps": 3, "stop": False})
    assert list(steps.kind) == ["warm_up", "warm_up"]


def spool(**records: list[Any]) -> Spool:
    """Makes a spool whose streams of texts each came in one batch."""
    return Spool(records={stream: [texts] for stream, texts in records.items()})


def names(*modules: tuple[int, str, str, int, int]) -> list[str]:
    """Names modules of (root, name below it, type, parent, bytes of own parameters)."""
    return list(module_table(spool(modules=[list(module) for module in modules])).name)


def test_texts_are_looked_up_by_number() -> None:
    """A number that points nowhere has an empty text."""
    assert list(look_up(["a", "b"], np.array([1, NONE, 0]))) == ["b", "", "a"]


def test_texts_of_several_batches_are_numbered_through() -> None:
    """Texts reach the disk as they are met, batch by batch."""
    kinds = tensor_kinds(Spool(records={"tensors": [[["2x3", "float32", "cpu"]], [["", "int64", "cpu"]]]}))
    assert kinds.shape == ["2x3", ""]
    assert kinds.dtype == ["float32", "int64"]


def test_tensors_alike_in_all_but_the_first_size_are_a_family() -> None:
    """A data set and its batches; not another type, another size behind, another count of sizes, or a scalar."""
    shapes = [["900x28", "float32"], ["64x28", "float32"], ["64x28", "int64"], ["64x29", "float32"]]
    shapes += [["64", "float32"], ["10", "float32"], ["", "float32"], ["64x28x1", "float32"]]
    families = tensor_kinds(spool(tensors=[[*shape, "cpu"] for shape in shapes])).families().tolist()
    assert families[0] == families[1]
    assert families[4] == families[5]
    assert len({families[0], families[2], families[3], families[4], families[6], families[7]}) == 6
    assert families[-1] == NONE  # that of no tensor


def test_the_one_model_keeps_its_own_names() -> None:
    """As in named_modules(): the root is "", its parts follow by their path."""
    table = module_table(
        spool(modules=[[0, "", "Net", -1, 0], [0, "body", "Sequential", 0, 0], [0, "body.0", "Linear", 1, 160]])
    )
    assert list(table.name) == ["", "body", "body.0"]
    assert list(table.type) == ["Net", "Sequential", "Linear"]
    assert table.parent_id.tolist() == [NONE, 0, 1]
    assert table.parameter_bytes.tolist() == [0, 0, 160]


def test_losses_beside_the_one_model_carry_their_type() -> None:
    """A module without parameters, such as a loss, is not a second model."""
    assert names((0, "", "Net", -1, 40), (0, "fc", "Linear", 0, 16), (1, "", "CrossEntropyLoss", -1, 0)) == [
        "",
        "fc",
        "CrossEntropyLoss",
    ]


def test_several_models_carry_their_types() -> None:
    """Roots of the same type are numbered, the first without a number."""
    modules = [(0, "", "Net", -1, 8), (0, "fc", "Linear", 0, 8), (1, "", "Net", -1, 8), (1, "fc", "Linear", 2, 8)]
    assert names(*modules, (2, "", "Critic", -1, 8)) == ["Net", "Net.fc", "Net#2", "Net#2.fc", "Critic"]


STACKS = [
    [-1, ["train.py:9:main", "train.py:20:<module>"]],
    [0, ["model.py:5:forward"]],
    [1, ["linear.py:3:forward"]],
    [0, ["model.py:5:forward"]],
    [-1, ["eval.py:1:<module>"]],
]


def test_stacks_are_spelled_out_with_their_outer_part() -> None:
    """A stack is a chain: its own frames, innermost first, then those of the call around it."""
    table, rows = stack_table(spool(stacks=STACKS), np.array([2, NONE, 0]))
    assert list(table.frames[rows[2]].split("\n")) == [
        "linear.py:3:forward",
        "model.py:5:forward",
        "train.py:9:main",
        "train.py:20:<module>",
    ]
    assert table.frames[rows[0]] == "train.py:9:main\ntrain.py:20:<module>"


def test_stacks_in_use_are_told_once() -> None:
    """Two numbers with the same frames are one stack; what no operator uses is left out; none is none."""
    table, rows = stack_table(spool(stacks=STACKS), np.array([1, 3, 1, NONE]))
    assert len(table) == 1
    assert rows[1] == rows[3] == 0
    assert rows[4] == rows[2] == NONE
    assert rows[NONE] == NONE


def test_a_very_deep_stack_is_spelled_out() -> None:
    """A chain of 5000 calls, as recursive modules make it, does not exhaust Python's own stack."""
    deep = [[number - 1, [f"tree.py:{number}:forward"]] for number in range(5000)]
    table, rows = stack_table(spool(stacks=deep), np.array([4999]))
    assert table.frames[rows[4999]].count("\n") == 4999
