"""Selects the part of a recording to keep, and its steps."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.steps import choose_epoch, last_event_ns, number_steps, step_table
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
