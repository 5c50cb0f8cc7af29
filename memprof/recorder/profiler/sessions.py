"""Runs memprof's own sessions of torch's C++ profiler so that the job's always come first.

There is one trace at a time in a process, whichever thread it is of: beginning one cancels the other, even one that
only warms up, and ending a cancelled one is a segmentation fault. So memprof begins none while the job has one, and
ends its own before the job's begins.

A session can be ended only in its own thread, and outside of backward, whose engine keeps it and puts it back. Where
the job begins one meanwhile, memprof's is cancelled, and its remains are taken from its thread once no trace is under
way.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _autograd, _profiler

from memprof.recorder.faults import raise_if_of_job
from memprof.recorder.profiler.core_library import errors_only
from memprof.recorder.profiler.kineto import kineto

# As torch has them: the guard puts its own in their place, for the job.
_prepare, _enable, _disable = _autograd._prepare_profiler, _autograd._enable_profiler, _autograd._disable_profiler
_is_enabled = _autograd._profiler_enabled
_graph_task = torch._C._current_graph_task_id
_get_ident = threading.get_ident

#: Reentrant: ending a session may free an object whose end begins another.
_lock = threading.RLock()
_running: ProfilerSession | None = None
#: Threads that still hold a session of memprof's that is over, and whether torch still calls it, since backward has put
#: that back, too.
_leftovers: dict[int, bool] = {}
#: Sessions that the job is about to begin: memprof's has ended, and Kineto does not tell of theirs yet.
_beginning = 0
#: Whether the job has begun a session, where Kineto does not tell of it: then it may have one at any time.
_has_job_begun = False


class ProfilerSession:
    """One session at a time, of the thread that starts it; it may be started again.

    Attributes:
        is_running: Whether it was started and not stopped; it may be cancelled meanwhile.
    """

    def __init__(self) -> None:
        """Prepares a session."""
        self.is_running = False
        self._thread = 0
        self._task = -1
        self._scope: Any = None
        self._is_lost = False
        self._is_abandoned = False

    def start(self, scope: Any, *, profile_memory: bool, with_device: bool = False) -> bool:
        """Starts, unless the job has a session of its own, or one that warms up, or no file can be opened.

        Args:
            scope: Which of torch's scopes to record.
            profile_memory: Record allocations.
            with_device: Time what runs on the CUDA device, too.

        Returns:
            Whether it was started.
        """
        global _running  # noqa: PLW0603 - Kineto has one trace in a process
        with _lock:
            if not may_start() or not can_open_files():
                return False
            is_first = not kineto().is_initialized
            # Before it begins: a signal handler of the job may raise at any point, and what has begun must be ended.
            self._thread, self._task, self._scope = _get_ident(), _graph_task(), scope
            self.is_running, self._is_lost, self._is_abandoned = True, False, False
            _running = self
            _begin(scope, profile_memory=profile_memory, with_device=with_device)
            if is_first:
                kineto().stop_thread()
            return True

    def stop(self) -> Any:
        """Stops, in the session's thread.

        Returns:
            torch's result; None where the job's profiler has taken over, and what was recorded is lost.
        """
        global _running
        if not self.is_running:
            return None
        with _lock:
            if self._is_lost:
                self.is_running = False
                clear_leftovers()
                return None
            result = None
            if _is_enabled():
                with kineto().silence():
                    result = _disable()
            else:
                _cancel()  # a signal handler of the job raised between the parts of its beginning or end
            _running, self.is_running = None, False
            if _graph_task() not in (-1, self._task):  # the engine puts it back when backward ends
                _leftovers[self._thread] = self._scope != _profiler.RecordScope.LITE_INTERPRETER
            return result

    def abandon(self) -> None:
        """Stops without a result, in the session's thread; inside backward, as soon as that is over.

        There the session may have seen a node begin, and leaving that node writes to the session's memory.
        """
        self._is_abandoned = True
        clear_leftovers()

    def _yield_to_job(self, thread: int) -> None:
        """Makes way for a session that the job begins in a thread."""
        global _running  # noqa: PLW0603 - as in start
        if thread == self._thread:
            self.stop()
            return
        self._is_lost = True
        _leftovers[self._thread] = False
        _running = None
        _cancel()


def may_start() -> bool:
    """Whether a session may start in this thread: the job has none, and none of memprof's runs."""
    return not is_job_profiling() and _running is None


def can_open_files() -> bool:
    """Whether Kineto could read the process's name, as it does for each session: else it complains on stderr."""
    if sys.platform != "linux":
        return True
    try:
        os.close(os.open("/proc/self/comm", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise_if_of_job(error)
        return False
    return True


def is_job_profiling() -> bool:
    """Whether the job's profiler warms up or runs, as far as that can be told in this thread."""
    clear_leftovers()
    return _running is None and bool(_beginning or _has_job_begun or _is_enabled() or kineto().is_active())


def make_way(*, is_kineto: bool) -> None:
    """Ends what memprof has, before the job begins a session in this thread; `way_is_taken` follows.

    Args:
        is_kineto: It will be a trace of Kineto's, of which there is one in the process; others are of their thread.
    """
    global _beginning, _has_job_begun  # noqa: PLW0603 - as in start
    with _lock:
        _beginning += 1
        session, thread = _running, _get_ident()
        if session is not None and (is_kineto or session._thread == thread):
            session._yield_to_job(thread)
        if thread in _leftovers and _is_enabled():
            _retire()
        if is_kineto and not kineto().can_tell:
            _has_job_begun = True


def way_is_taken() -> None:
    """Follows `make_way` once the job has begun its session, or has failed to."""
    global _beginning  # noqa: PLW0603 - as in start
    with _lock:
        _beginning -= 1


def clear_leftovers() -> None:
    """Takes a cancelled session from this thread, if it holds one, and nothing is under way that it would disturb.

    One that was abandoned inside backward ends here, too: where it outlived the process's C++ objects, its end would
    be a segmentation fault.
    """
    if _graph_task() != -1:
        return
    abandoned = _running
    if abandoned is not None and abandoned._is_abandoned and abandoned._thread == _get_ident():
        abandoned.stop()
    if _get_ident() in _leftovers:
        with _lock:
            if not _is_enabled():
                del _leftovers[_get_ident()]
            elif not (_running or _beginning or _has_job_begun or kineto().is_active()):
                _retire()


@contextmanager
def short_session() -> Iterator[ProfilerSession]:
    """Holds off the job's sessions in other threads, for as long as one operator runs inside a session."""
    with _lock:
        session = ProfilerSession()
        try:
            yield session
        finally:
            session.stop()


def begin_anew_after_fork() -> None:
    """Forgets in a forked child what other threads of its parent were about: they are not there."""
    global _lock, _running, _beginning  # noqa: PLW0603 - one lock and one trace a process
    _lock, _beginning = threading.RLock(), 0
    for thread in _leftovers.keys() - {_get_ident()}:
        del _leftovers[thread]
    if _running is not None and _running._thread != _get_ident():
        _running = None
        _cancel()


def _begin(scope: Any, *, profile_memory: bool, with_device: bool = False) -> None:
    config = _config(profile_memory=profile_memory)
    activities = {_profiler.ProfilerActivity.CPU}
    if with_device:
        activities.add(_profiler.ProfilerActivity.CUDA)
    with kineto().silence():
        _prepare(config, activities)
        _enable(config, activities, {scope})  # type: ignore[call-arg]  # torch's own stub lacks it


def _cancel() -> None:
    """Ends the trace of another thread: one that begins and ends here takes its place."""
    if not _is_enabled():
        with errors_only():
            _begin(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=False)
            with kineto().silence():
                _disable()


def _retire() -> None:
    """Ends what is left of a session: torch ends it together with Kineto's trace, which must be there again for that.

    Inside backward it comes back once more.
    """
    with errors_only(), kineto().silence():
        _prepare(_config(profile_memory=False), {_profiler.ProfilerActivity.CPU})
        _disable()
    if _leftovers[_get_ident()]:
        # Torch would have it record into the job's next session. There is no entry to take out one alone.
        _autograd._clear_callbacks()  # type: ignore[attr-defined]  # torch's own stub lacks it
    if _graph_task() == -1:
        del _leftovers[_get_ident()]


def _config(*, profile_memory: bool) -> Any:
    experimental = _profiler._ExperimentalConfig()
    return _profiler.ProfilerConfig(
        _profiler.ProfilerState.KINETO, False, profile_memory, False, False, False, experimental
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=begin_anew_after_fork)
