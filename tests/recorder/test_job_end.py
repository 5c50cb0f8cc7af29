"""How a job ends after its window."""

from __future__ import annotations

import multiprocessing
import signal

import pytest

from memprof.recorder.steps.window import end_job


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
