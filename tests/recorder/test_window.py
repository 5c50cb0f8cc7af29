"""How each step is observed, and how a job ends after its window."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.recorder.memory import kept
from memprof.recorder.memory.holders import find_holders
from memprof.recorder.recorder import Recorder
from memprof.recorder.steps.window import Window, end_job
from memprof.trace.files.spool import read_spool
from memprof.trace.schema import Steps
from tests.recorder.recorded import record_script

JOB = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def watches(window: Window, count: int) -> list[str]:
    return [window.watch(step).value for step in range(count)]


def test_two_steps_pass_and_three_are_recorded() -> None:
    """By default; then one is timed, three are left alone, and the rest of the job runs on unobserved."""
    expected = ["warm_up"] * 2 + ["recorded"] * 3 + ["timed"] + ["plain"] * 3 + ["closed"] * 2
    assert watches(Window(), 11) == expected


def test_the_sizes_of_inputs_are_checked_in_steps_that_only_the_clock_sees() -> None:
    """Where recording can go on, only the first step after the timed one is left alone; three count for the time."""
    window = Window(skip=0, steps=1, goes_on=True)
    assert watches(window, 6) == ["recorded", "timed", "plain", "resting", "resting", "resting"]
    assert [window.is_clocked(step) for step in range(6)] == [False, False, True, True, True, False]


def test_three_plain_steps_are_clocked(tmp_path: Path) -> None:
    """Whether the job is stopped after its window or goes on, and their median is the step time."""
    for options in ((), ("--stop",)):
        steps = record_script(tmp_path, JOB, *options).trace.table(Steps)
        assert list(steps.kind) == ["warm_up", "warm_up", "recorded", "recorded", "recorded", "timed", *["plain"] * 3]
        assert steps.is_complete.all()
        assert (steps.duration_us > 0).all()


def recorded_until(folder: Path, job: str, before_end: Callable[[], None]) -> dict[str, list[Any]]:
    """Returns the records of a job whose window of three steps is over as it ends."""
    gc.collect()
    recorder = Recorder(folder, Window(skip=0, steps=3, goes_on=True))
    recorder.install()
    names: dict[str, Any] = {}
    try:
        exec(job, names)
        before_end()
    finally:
        recorder.finish("the job ended")
    assert not recorder.failure
    return read_spool(folder).records


def test_the_search_for_growth_is_in_no_clocked_step(tmp_path: Path) -> None:
    """What became more is looked for after such a step's time was taken."""
    records = recorded_until(tmp_path / "process-1", JOB, lambda: None)
    stated = {one["step"]: one["time_ns"] for found in records["holders"] for one in found if not one["dtype"]}
    ends = {one["step"]: one["end_ns"] for one in records["steps"] if one["kind"] == "plain"}
    both = set(stated) & set(ends)
    assert both
    assert all(stated[step] > ends[step] for step in both)


def test_a_job_does_not_wait_long_at_its_end_for_a_search_without_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once statements have had their share of the run, the last one has the least time of all to follow references."""
    limits: list[float] = []

    def followed(*args: Any, seconds: float, **more: Any) -> Any:
        limits.append(seconds)
        return find_holders(*args, seconds=seconds, **more)

    def spend() -> None:
        monkeypatch.setattr(kept, "_ALLOWANCE_S", -1e9)
        monkeypatch.setattr(kept, "find_holders", followed)

    job = "kept = []\n" + JOB.replace("    model(", "    kept.append(torch.ones(77))\n    model(")
    last = recorded_until(tmp_path / "process-1", job, spend)["holders"][-1]
    assert {one["tensors"] for one in last if one["shape"] == "77"} == {10}
    assert limits == [kept._LEAST_S]


def kinds(steps: Steps) -> list[str]:
    """The complete steps after the recorded ones."""
    return [
        kind for kind, whole, step in zip(steps.kind, steps.is_complete, steps.step, strict=True) if whole and step > 4
    ]


def test_a_step_of_which_an_evaluation_is_recorded_is_not_clocked(tmp_path: Path) -> None:
    """Its clock started anew with the recording: it would count as a short step."""
    evaluation = """
    if step == 7:
        with torch.no_grad():
            for size in (16, 4, 4):
                model(torch.ones(size, 8))
    model(torch"""
    job = JOB.replace("for _ in", "for step in").replace("\n    model(torch", evaluation, 1)
    steps = record_script(tmp_path, job).trace.table(Steps)
    assert list(steps.step) == list(range(9))
    assert kinds(steps) == ["timed", "plain", "plain"]
    assert list(steps.kind)[7] == "recorded"


def test_calls_of_a_job_without_optimizer_are_not_clocked_as_steps(tmp_path: Path) -> None:
    """After the window each call of its model counts as a step, and this one calls it twice in each."""
    update = "[each.data.sub_(0.1 * each.grad) for each in model.parameters()]; model.zero_grad()"
    job = JOB.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", "")
    job = job.replace("optimizer.step()", update).replace("    optimizer.zero_grad()\n", "")
    job = job.replace("model(torch.ones(4, 8))", "(model(torch.ones(4, 8)) + model(torch.ones(4, 8)))")
    assert "plain" not in record_script(tmp_path, job).trace.table(Steps).kind


@pytest.mark.parametrize("options", [(), ("--stop",)])
def test_a_step_in_the_profiler_of_the_job_is_not_plain(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The job's own profiler makes a step longer: only those without it count for the step time."""
    start = "for step in range(10):\n    if step == 7:\n        torch.profiler.profile().start()\n"
    steps = record_script(tmp_path, JOB.replace("for _ in range(10):\n", start), *options).trace.table(Steps)
    assert kinds(steps) == ["timed", "plain"]


def test_the_first_step_can_be_recorded() -> None:
    """A window that skips nothing begins with the job."""
    assert watches(Window(skip=0, steps=1), 4) == ["recorded", "timed", "plain", "plain"]


def test_a_long_way_to_the_window_is_not_recorded() -> None:
    """Only as many warm-up steps are recorded as the window has, in case the job ends early; the rest is skipped."""
    expected = ["warm_up", "warm_up", "skipped", "skipped", "skipped", "recorded", "recorded", "timed", "plain"]
    assert watches(Window(skip=5, steps=2), 9) == expected


@pytest.mark.parametrize(("skip", "steps"), [(-1, 1), (0, 0), (2, -3)])
def test_a_window_without_steps_is_refused(skip: int, steps: int) -> None:
    """With a message that contains both numbers."""
    with pytest.raises(ValueError, match=f"invalid window: skip={skip}, steps={steps};"):
        Window(skip, steps)


_SCHEDULE = """
import torch
shown = torch.optim.Adam(torch.nn.Linear(1, 1).parameters())
schedule = torch.optim.lr_scheduler.LambdaLR(shown, lambda step: 1 / (step + 1))
for _ in range(20):  # to plot it
    shown.step()
    schedule.step()
"""


def test_recording_begins_with_the_first_update_that_has_gradients(tmp_path: Path) -> None:
    """A job that plots its learning rates before it trains steps an optimizer without any."""
    ended = record_script(tmp_path, _SCHEDULE + "del shown, schedule\n" + JOB)
    assert ended.returncode == 0, ended.stderr
    assert ended.peak == record_script(tmp_path, JOB, name="alone.memprof").peak


_FUNCTIONAL = """
import torch

class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for each in self.param_groups[0]["params"]:
            UPDATE

weight = torch.ones(8, 8, requires_grad=True)
optimizer = Own([weight])
for _ in range(10):
    (torch.ones(4, 8) @ weight).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("update", ["each -= 0.1 * each.grad; each.grad = None", "each.copy_(torch.randn(8, 8))"])
def test_an_optimizer_of_the_job_that_leaves_no_gradients_begins_recording(tmp_path: Path, update: str) -> None:
    """It clears them itself, or needs none; the job has no modules, so recording begins with its first update."""
    job = _FUNCTIONAL.replace("UPDATE", update)
    if "copy_" in update:
        job = job.replace(".sum().backward()", ".sum()")
    assert record_script(tmp_path, job).trace.table(Steps).is_complete.sum() >= 5


def test_a_job_ends_as_with_sys_exit() -> None:
    """Its timers have stopped by then: Python has no handlers any more when it ends, and a timer would kill it."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 60)
        with pytest.raises(SystemExit) as raised:
            end_job()
        assert raised.value.code == 0
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_process_of_a_pool_goes_on() -> None:
    """A pool replaces a process that ends, and waits for ever for what it was about to return."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(end_job).get(timeout=30) is None


def test_what_follows_the_last_step_is_no_step_of_its_own(tmp_path: Path) -> None:
    """A job of two iterations that prints its loss at the end has two steps; what an evaluation runs stays apart."""
    job = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.ones(4, 8)).sum()
    loss.backward()
    optimizer.step()
print(loss.item(), torch.ones(1000).sum().item())
"""
    trace = record_script(tmp_path, job).trace
    assert trace.table(Steps).step.tolist() == [0, 1]
    assert trace.table(Steps).is_complete.all()
    assert set(trace.step(1).ops.phase[-4:]) == {"other"}
    assert "aten.ones.default" in trace.step(1).ops.name[-4:]


def test_what_follows_the_last_update_is_the_window_that_was_asked_for(tmp_path: Path) -> None:
    """After skipped steps it belongs to none recorded before: a last save is step 8 of a job of eight updates."""
    job = """
import io, torch
model = torch.nn.Linear(64, 64)
extra = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
torch.save({name: one.clone() for name, one in extra.state_dict().items()}, io.BytesIO())
"""
    trace = record_script(tmp_path, job, "--skip", "8", "--steps", "1").trace
    assert trace.recorded_steps == (8,)
    assert trace.fullest_step().number == 8
    assert set(trace.step(8).ops.phase) == {"saving", "other"}
