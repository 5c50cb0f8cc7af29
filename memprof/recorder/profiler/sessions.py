"""Runs memprof's own sessions of torch's C++ profiler, giving precedence to the job's.

A process has one trace at a time, whichever thread owns it: beginning one cancels the other, even one that is only
warming up, and ending a cancelled one is a segmentation fault. So memprof begins none while the job has one, and
ends its own before the job's begins.

A session can be ended only in its own thread, and outside backward, whose engine saves and restores it. If the job
begins one meanwhile, memprof's is cancelled, and its remains are removed from its thread once no trace is running.

Memory alone is recorded by the listener where it is built (`recorder.profiler.listener`), under the same rules. It is
no trace: the job's in other threads do not end it, and it may end inside backward.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _autograd, _profiler

from memprof.recorder.faults import raise_if_of_job
from memprof.recorder.profiler.listener import Listener, find_listener
from memprof.recorder.profiler.torch_library import errors_only, kineto

# Torch's originals: the guard replaces them for the job.
_prepare, _enable, _disable = _autograd._prepare_profiler, _autograd._enable_profiler, _autograd._disable_profiler
_is_enabled = _autograd._profiler_enabled
_graph_task = torch._C._current_graph_task_id
_get_ident = threading.get_ident

#: Reentrant: ending a session may free an object whose destructor begins another.
_lock = threading.RLock()
_running: ProfilerSession | None = None
#: Threads that still hold a session of memprof's that is over, and whether torch still calls its callbacks because
#: backward has restored them.
_leftovers: dict[int, bool] = {}
#: Threads that may still hold a listener that is over: backward restores it.
_listened: set[int] = set()
#: Sessions that the job is about to begin: memprof's has ended, and Kineto does not report theirs yet.
_beginning = 0
#: Whether the job has begun a session that Kineto does not report: it may then have one at any time.
_has_job_begun = False


class ProfilerSession:
    """A session of the thread that starts it; it may be restarted.

    Attributes:
        is_running: Whether it was started and not stopped; it may have been cancelled since.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._thread = 0
        self._task = -1
        self._scope: Any = None
        self._is_lost = False
        self._is_abandoned = False
        self._listener: Listener | None = None

    def start(self, scope: Any, *, profile_memory: bool, with_device: bool = False, keeps_events: bool = True) -> bool:
        """Starts, unless the job's own session is running or warming up, or no file can be opened.

        Args:
            scope: Which of torch's scopes to record.
            profile_memory: Record allocations.
            with_device: Also time the work on the CUDA device.
            keeps_events: Keep each event; the listener may keep the highest count alone.

        Returns:
            Whether it was started.
        """
        global _running  # noqa: PLW0603 - Kineto has one trace per process
        with _lock:
            is_memory = profile_memory and scope == _profiler.RecordScope.LITE_INTERPRETER
            self._listener = find_listener() if is_memory else None
            if not may_start() or (self._listener is None and why_no_file()):
                return False
            is_first = not kineto().is_initialized
            # Set before it begins: a signal handler of the job may raise at any point; a begun session must be ended.
            self._thread, self._task, self._scope = _get_ident(), _graph_task(), scope
            self.is_running, self._is_lost, self._is_abandoned = True, False, False
            _running = self
            if self._listener is not None:
                if not self._listener.start(keeps_events=keeps_events):
                    _running, self.is_running = None, False
                return self.is_running
            _begin(scope, profile_memory=profile_memory, with_device=with_device)
            if is_first:
                kineto().stop_thread()
            return True

    def stop(self) -> Any:
        """Stops, in the session's thread.

        Returns:
            torch's result, or the listener's; None if the job's profiler has taken over and the events are lost.
        """
        global _running
        if not self.is_running:
            return None
        with _lock:
            if self._is_lost:
                self.is_running = False
                clear_leftovers()
                return None
            result: Any = None
            if self._listener is not None:
                result = self._listener.stop()
                _running, self.is_running = None, False
                _listened.add(self._thread)
                _remove_listener()
                return result
            if _is_enabled():
                with kineto().silence():
                    result = _disable()
            else:
                _cancel()  # a signal handler of the job raised during its start or stop
            _running, self.is_running = None, False
            if _graph_task() not in (-1, self._task):  # the engine restores it when backward ends
                _leftovers[self._thread] = self._scope != _profiler.RecordScope.LITE_INTERPRETER
            return result

    def abandon(self) -> None:
        """Stops without a result, in the session's thread; inside backward, as soon as that is over.

        Inside backward the session may have recorded the begin of a node, and leaving the node writes to its memory.
        """
        self._is_abandoned = True
        clear_leftovers()

    def _is_passed_on(self, thread: int) -> bool:
        """Whether it records backward's nodes, and backward runs in a thread other than its own."""
        is_of_nodes = self._scope == _profiler.RecordScope.BACKWARD_FUNCTION
        return is_of_nodes and thread != self._thread and _graph_task() != -1 and _is_enabled()

    def _yield_to_job(self, thread: int) -> None:
        """Yields to a session that the job begins in a thread."""
        global _running  # noqa: PLW0603 - as in start
        if thread == self._thread:
            self.stop()
            return
        if self._listener is not None:
            return
        self._is_lost = True
        _leftovers[self._thread] = False
        _running = None
        _cancel()


def may_start() -> bool:
    """Whether a session may start in this thread: neither the job nor memprof has one running."""
    return not is_job_profiling() and _running is None


def why_no_file() -> str:
    """Returns why Kineto could not read the process's name, as it does for each session: it would warn on stderr."""
    if sys.platform != "linux":
        return ""
    try:
        os.close(os.open("/proc/self/comm", os.O_RDONLY | os.O_CLOEXEC))
    except Exception as error:  # noqa: BLE001 - audit hooks of the job may raise any
        raise_if_of_job(error)
        has_none = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
        return "no file descriptor left (ulimit -n)" if has_none else f"{type(error).__name__}: {error}"
    return ""


def has_proc() -> bool:
    """Whether the system has the files that Kineto reads: without, it warns on stderr at every end of a session."""
    return sys.platform != "linux" or os.access("/proc/self/comm", os.F_OK)


def why_no_session() -> str:
    """Returns why no session could start."""
    return "the job's own profiler ran" if has_proc() else "torch's profiler was off (no /proc)"


def is_job_profiling() -> bool:
    """Whether the job's profiler is warming up or running, as far as this thread can determine."""
    clear_leftovers()
    return _running is None and bool(_beginning or _has_job_begun or _is_enabled() or kineto().is_active())


def make_way(*, is_kineto: bool) -> None:
    """Ends memprof's session before the job begins one in this thread; `way_is_taken` must follow.

    Args:
        is_kineto: The job's will be a Kineto trace, of which a process has one; others belong to their thread.

    Raises:
        RuntimeError: Backward has passed memprof's session on to this thread. Torch takes it for one of the job's, and
            would end it here while other threads are inside nodes that it records: a segmentation fault.
    """
    global _beginning, _has_job_begun  # noqa: PLW0603 - as in start
    with _lock:
        session, thread = _running, _get_ident()
        if session is not None and is_kineto and session._is_passed_on(thread):
            raise RuntimeError("Profiler is already enabled on this thread: memprof's, until this backward is over")
        _beginning += 1
        if session is not None and (is_kineto or session._thread == thread):
            session._yield_to_job(thread)
        if has_listeners() and (found := find_listener()) is not None:
            found.clear(evicts=True)  # whatever backward has put into this thread
        if thread in _leftovers and _is_enabled():
            _retire()
        if is_kineto and not kineto().can_report:
            _has_job_begun = True


def way_is_taken() -> None:
    """Completes `make_way` once the job has begun its session, or has failed to."""
    global _beginning  # noqa: PLW0603 - as in start
    with _lock:
        _beginning -= 1


def has_listeners() -> bool:
    """Whether a thread may still hold a listener: the job's next session there must remove it."""
    return bool(_listened) or (_running is not None and _running._listener is not None)


def clear_leftovers() -> None:
    """Removes a cancelled session from this thread, if it holds one and nothing running would be disturbed.

    A session abandoned inside backward ends here, too: if it outlived the process's C++ objects, ending it would be a
    segmentation fault.
    """
    if _graph_task() != -1:
        return
    abandoned = _running
    if abandoned is not None and abandoned._is_abandoned and abandoned._thread == _get_ident():
        abandoned.stop()
    _remove_listener()
    if _get_ident() in _leftovers:
        with _lock:
            if not _is_enabled():
                del _leftovers[_get_ident()]
            elif not (_running or _beginning or _has_job_begun or kineto().is_active()):
                _retire()


@contextmanager
def short_session() -> Iterator[ProfilerSession]:
    """Blocks the job's sessions in other threads while one operator runs inside a session."""
    with _lock:
        session = ProfilerSession()
        try:
            yield session
        finally:
            session.stop()


def initialize_here() -> None:
    """Has Kineto initialize itself in this thread, which should be the main one: in any other it prints an error."""
    if _graph_task() == -1 and not kineto().is_initialized:
        with short_session() as session:
            session.start(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=False)


def begin_anew_after_fork() -> None:
    """Resets, in a forked child, the state of the parent's other threads: they do not exist there."""
    global _lock, _running, _beginning  # noqa: PLW0603 - one lock and one trace per process
    _lock, _beginning = threading.RLock(), 0
    for thread in _leftovers.keys() - {_get_ident()}:
        del _leftovers[thread]
    if _running is not None and _running._thread != _get_ident():
        is_trace = _running._listener is None
        _running = None
        if is_trace:
            _cancel()


def _begin(scope: Any, *, profile_memory: bool, with_device: bool = False) -> None:
    config = _config(profile_memory=profile_memory)
    activities = {_profiler.ProfilerActivity.CPU}
    if with_device:
        activities.add(_profiler.ProfilerActivity.CUDA)
    _remove_listener()
    with kineto().silence():
        _prepare(config, activities)
        _enable(config, activities, {scope})  # type: ignore[call-arg]  # torch's own stub lacks it


def _remove_listener() -> None:
    """Removes a listener that is over from this thread, which torch would take for a session of the job's."""
    thread = _get_ident()
    if thread in _listened and (found := find_listener()) is not None and found.clear() and _graph_task() == -1:
        _listened.discard(thread)


def _cancel() -> None:
    """Ends the trace of another thread by replacing it with one that begins and ends here."""
    if not _is_enabled():
        with errors_only():
            _begin(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=False)
            with kineto().silence():
                _disable()


def _retire() -> None:
    """Ends what is left of a session: torch ends it together with a Kineto trace, which must exist again for that.

    Inside backward it is restored once more.
    """
    with errors_only(), kineto().silence():
        _prepare(_config(profile_memory=False), {_profiler.ProfilerActivity.CPU})
        _disable()
    if _leftovers[_get_ident()]:
        # Torch would make it record into the job's next session. A single callback cannot be removed.
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
