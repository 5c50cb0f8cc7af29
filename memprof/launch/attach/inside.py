"""What an attach runs in the job, on its main thread: each function writes its answer beside the request."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from memprof.launch import child
from memprof.recorder.compiled.uncompiled import is_within_compiled_call
from memprof.recorder.faults import raise_if_of_job
from memprof.recorder.light.recorder import LightRecorder
from memprof.recorder.machine import find_rank
from memprof.recorder.memory.live_objects import live_objects
from memprof.recorder.memory.present import write_present
from memprof.recorder.profiler.sessions import initialize_here
from memprof.recorder.recorder import Recorder
from memprof.recorder.steps.update_hooks import UpdateHooks
from memprof.recorder.steps.window import Window

#: How often it is looked whether the recording is over, or the attaching command gone.
_POLL_S = 0.1
#: Inside these, torch may be walking through its table of hooks.
_OPTIMIZERS = ("torch.optim",)
#: Inside these, a thread trains. For so long it is looked which do.
_TRAINING = ("torch.optim", "torch.autograd.graph")
_LOOK_S = 0.3
#: What operators call directly.
_CALLED_BY_OPERATORS = ("__torch_dispatch__", "__torch_function__")
_keeps_for_backward: Any = torch._C._autograd._top_saved_tensors_default_hooks  # not annotated in torch
_recording: Recording | None = None


class RefusedError(Exception):
    """Something that this job does not permit."""


def look(folder: str, request: str, arguments: Mapping[str, Any]) -> None:
    """Tells which threads train, beside the main thread: whether only the main thread does, or only one does."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        raise RefusedError("gevent has replaced the job's threads, beside which nothing can run: use memprof record")
    threading.Thread(target=_look, args=(request,), name="memprof-attach", daemon=True).start()


def _look(request: str) -> None:
    found: set[int] = set()
    until = time.monotonic() + _LOOK_S
    while time.monotonic() < until:
        found |= _threads_within(_TRAINING)
        time.sleep(_LOOK_S / 100)
    with suppress(OSError):  # the attaching command was killed, and its folder removed by another
        _answer(request, threads=len(found), others=len(found - {threading.main_thread().ident}))


def dump(folder: str, request: str, arguments: Mapping[str, Any]) -> None:
    """Writes what is alive now to a folder beside the request."""
    begun = time.perf_counter(), time.thread_time()
    write_present(Path(f"{request}-present"))
    ended = time.perf_counter(), time.thread_time()
    _answer(
        request,
        spool=f"{request}-present",
        pause_s=ended[0] - begun[0],
        processor_s=ended[1] - begun[1],
        rank=find_rank(os.environ)[0],
    )


def begin(folder: str, request: str, arguments: Mapping[str, Any]) -> None:
    """Begins a recording at the job's next step: `spool`, `steps`, whether `light`, and the `lock` of the attach."""
    global _recording  # noqa: PLW0603 - one recording per process
    if child.is_recording() or (_recording is not None and _recording.is_running()):
        raise RefusedError("the job is being recorded already")
    _recording = Recording(Path(folder), arguments)
    try:
        _recording.begin()
        _answer(request, rank=find_rank(os.environ)[0])
    except BaseException:
        _recording.finish("the attach failed", None)
        raise
    _recording.step()  # not before: what fails leaves no hook in the job


def end(folder: str, request: str, arguments: Mapping[str, Any]) -> None:
    """Ends the recording, at once or after the backward that is running."""
    recording = _recording if _recording is not None and _recording.is_running() else None
    if recording is not None:
        recording.is_asked = recording.is_ending = True
    try:
        _answer(request, is_recording=recording is not None)
    finally:
        if recording is not None:
            recording.is_asked = False


class Recording:
    """A recording of this process that an attach has begun. It goes on until its window is over or the attach ends.

    Attributes:
        is_over: Its hooks are removed.
        is_ending: It ends after the next update, or where the job is in no call of torch's.
        is_asked: A pending call is in the interpreter's queue, or runs: no other may be added meanwhile. Under
            sys.settrace, functions that a pending call calls would wait forever for it (Python 3.11).
    """

    def __init__(self, folder: Path, arguments: Mapping[str, Any]) -> None:
        """Prepares it; see `begin`."""
        self.is_over = False
        self._folder, self._lock = folder, str(arguments["lock"])
        self._process = os.getpid()
        spool = Path(arguments["spool"]) / f"process-{self._process}"
        self._recorder: Recorder | LightRecorder
        if arguments["light"]:
            self._recorder = LightRecorder(spool, is_late=True)
        else:
            self._recorder = Recorder(spool, Window(skip=1, steps=int(arguments["steps"])), is_late=True)
        self._updates: UpdateHooks | None = None
        self._is_begun, self.is_ending = False, False
        self.is_asked = True  # `begin` is within one

    def begin(self) -> None:
        """Has `step` called until it is over, once it is no longer asked."""
        atexit.register(self._at_exit)
        initialize_here()  # the next update may be in another thread
        threading.Thread(target=self._watch, name="memprof-attach", daemon=True).start()

    def is_running(self) -> bool:
        """Whether it goes on, in this process and not the one that forked it."""
        return not self.is_over and os.getpid() == self._process

    def _call_soon(self) -> None:
        if not self.is_asked:
            self.is_asked = True  # before the call may run
            if ctypes.pythonapi.Py_AddPendingCall(_is_true, ctypes.py_object(_step)):
                self.is_asked = False  # the queue is full

    def step(self) -> None:
        """Begins or ends the recording, here between two bytecodes or after the next update: steps are whole."""
        try:
            if self._is_idle() or _is_within(_OPTIMIZERS) or _threads_within(_OPTIMIZERS):
                return
            if self._recorder.is_closed or (_is_outside_torch() and self._may_go_on()):
                self._go_on()
            elif self._updates is None:
                self._updates = UpdateHooks(None, self._after_update)
                self._updates.install()
        except Exception as error:  # noqa: BLE001 - nothing else may reach the job
            raise_if_of_job(error)
        finally:
            self.is_asked = False

    def _may_go_on(self) -> bool:
        """Whether the next update need not be waited for."""
        return self._recorder.may_finish_here() if self.is_ending else not _has_optimizers()

    def _is_idle(self) -> bool:
        """Whether there is nothing to do: the recording runs, is over, or is that of the process that forked this."""
        return not self.is_running() or (self._is_begun and not self.is_ending)

    def _after_update(self, *_: Any) -> None:
        # Hooks may be added and removed here if no other is called after this one, in this update, in one around it, or
        # in another thread; and sessions of torch's profiler begin and end outside of backward and of compiled calls.
        try:
            if self._updates is None or self._is_idle() or torch._C._current_graph_task_id() != -1:
                return
            if not self._updates.is_last() or self._updates.is_nested() or is_within_compiled_call():
                return
            if not _threads_within(_OPTIMIZERS):
                self._go_on()
        except Exception as error:  # noqa: BLE001 - nothing else may reach the job
            raise_if_of_job(error)

    def _go_on(self) -> None:
        if self.is_ending and not self._recorder.may_finish_here():
            return  # after an update of the thread that is recorded
        self._remove_hook()
        if self.is_ending:
            self.finish("the attaching command ended it", None)
        elif not self._is_begun:
            self._is_begun = True
            self._recorder.install()

    def _remove_hook(self) -> None:
        if self._updates is not None:
            self._updates.remove()
            self._updates = None

    def _at_exit(self) -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        with suppress(Exception):  # nothing may reach the job, which is over
            self.finish("the job ended", error)

    def finish(self, reason: str, error: BaseException | None) -> None:
        """Ends it here, if it has not ended; `error` is what ends the job, if anything does."""
        if not self.is_running():
            return
        self.is_over = True
        atexit.unregister(self._at_exit)
        try:
            self._remove_hook()
            if self._is_begun and not self._recorder.is_closed:
                self._recorder.finish(reason, error)
        finally:
            with suppress(OSError):  # the attaching command was killed, and its folder removed by another
                (self._folder / f"over-{self._process}").write_text(self._recorder.failure, encoding="utf-8")

    def _watch(self) -> None:
        """Ends the recording once its window is over, or the attaching command gone, whose lock is then free."""
        while not self.is_over:
            time.sleep(_POLL_S)
            if self._recorder.is_closed or self._recorder.failure or _is_free(self._lock):
                self.is_ending = True
            if not self._is_idle():
                self._call_soon()


class _Step:
    def __bool__(self) -> bool:
        if _recording is not None:
            _recording.step()
        return False


#: What stands in the interpreter's queue, which holds no reference to it: never freed. Unlike a function of ctypes,
#: this one of C passes on what a signal handler of the job raises.
_step, _is_true = _Step(), ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)


def _has_optimizers() -> bool:
    return bool(live_objects(torch.optim.Optimizer))


def _is_outside_torch() -> bool:
    """Whether the main thread runs the job's own code, called by nothing of torch's, outside of backward.

    Functions that operators call have no frame of torch's below them; those that keep tensors for backward may be
    anything.
    """
    if torch._C._current_graph_task_id() != -1 or _keeps_for_backward(True):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _CALLED_BY_OPERATORS:
            return False
        frame = frame.f_back
    return not _is_within(("torch.", "memprof.recorder."))


def _is_within(modules: tuple[str, ...], innermost: FrameType | None = None) -> bool:
    """Whether a function of some modules, by the beginning of their names, has called a frame: by default, this one."""
    frame: FrameType | None = innermost or sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(modules):
            return True
        frame = frame.f_back
    return False


def _threads_within(modules: tuple[str, ...]) -> set[int]:
    """Returns the other threads that are within some modules; see `_is_within`.

    This function's own frame would be in a table that it refers to itself: all frames, and the variables in them, would
    be kept until a garbage collection.
    """
    frames, found = sys._current_frames(), set()
    del frames[threading.get_ident()]
    while frames:
        thread, frame = frames.popitem()
        if _is_within(modules, frame):
            found.add(thread)
    return found


def _is_free(lock: str) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _answer(request: str, **answer: Any) -> None:
    with open(f"{request}.new", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.rename(f"{request}.new", f"{request}.json")
