"""How a job ends after its window."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import pytest

from memprof.recorder.steps.window import end_job
from memprof.trace.schema import Steps
from tests.recorder.recorded import record_script


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
