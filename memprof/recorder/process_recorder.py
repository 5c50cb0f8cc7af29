"""What every recorder of a process shares: its hooks in the job, and faults that end the recording but not the job."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from memprof.recorder.calls.modules import BackwardCalls, ModuleCallObserver
from memprof.recorder.calls.tracebacks import remove_own_frames
from memprof.recorder.compiled.uncompiled import is_within_compiled_call, skip_compiling
from memprof.recorder.faults import explain_fault, raise_if_of_job, write_fault
from memprof.recorder.interfaces import PlanHooks
from memprof.recorder.machine import is_loader_worker
from memprof.recorder.memory.live_objects import live_objects, live_optimizers
from memprof.recorder.memory.out_of_memory import describe_full_sharing, find_out_of_memory, write_unrecorded
from memprof.recorder.memory.tensor_memory import note_call_elsewhere
from memprof.recorder.profiler.native import AllocatorTable
from memprof.recorder.profiler.profiler_guard import ProfilerGuard
from memprof.recorder.profiler.sessions import clear_leftovers
from memprof.recorder.steps.rounds import OptimizerRounds, state_of_update
from memprof.recorder.steps.update_hooks import UpdateHooks
from memprof.recorder.steps.window import end_job
from memprof.recorder.thread_observation import ThreadObservation

ObservationT = TypeVar("ObservationT", bound=ThreadObservation)


class ProcessRecorder(ABC, Generic[ObservationT]):
    """Records one process. Call `install` once torch is imported; recording starts when a model is first called.

    In a job without models and optimizers it starts with the first backward, and each backward ends a step.

    An internal failure ends the recording, which states the reason; the job continues. Only exceptions that interrupt
    the job itself (KeyboardInterrupt, SystemExit) propagate.

    Attributes:
        failure: Traceback of the fault that ended the recording, or the limit that was hit; "" while there is none.
    """

    def __init__(self, folder: Path, *, is_late: bool, plan: PlanHooks | None, finds_roots: bool = False) -> None:
        """Prepares a recording.

        Args:
            folder: Spool folder of this process; created when the recording begins.
            is_late: Tensors were allocated before this recorder was created.
            plan: The plan to run the job under; called for its module calls and updates.
            finds_roots: Calls of root models alone will be observed for a time.
        """
        self.failure = ""
        self._folder = folder
        self._is_late = is_late
        self._plan = plan
        self._table = AllocatorTable()
        self._rounds = OptimizerRounds()
        self._calls = ModuleCallObserver(self._enter, self._leave, finds_roots=finds_roots)
        self._guard = ProfilerGuard(self._make_way)
        self._updates = UpdateHooks(self._note_update, self._after_update)
        self._backwards = BackwardCalls(self._begin_backward, self._end_backward)
        self._is_bare = False  # neither a model nor an optimizer was met: each backward ends a step
        self._observation: ObservationT | None = None
        self._beginning = threading.Lock()  # acquired once, by the thread that is then observed
        self._has_manual_steps = False
        self._has_pending_end = False
        self._is_called_outside = False  # models are called outside of compiled calls, so that a step can end there
        self._stops_job = False
        self._step = 0
        self._before_first = (False, 0)  # state before an update, while nothing is recorded

    def install(self) -> None:
        """Installs the hooks; the job runs unchanged until it calls a model."""
        kind = type(self)
        skip_compiling(
            kind._enter,
            kind._leave,
            kind._note_update,
            kind._before_update,
            kind._after_update,
            BackwardCalls._enter,
            kind._begin_backward,
            kind._end_backward,
            UpdateHooks._call_before,
            UpdateHooks._call_after,
        )
        self._table.switch_on(is_late=self._is_late)
        self._calls.install()
        self._guard.install()
        self._updates.install()
        self._backwards.install()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_abandon, weakref.ref(self)))

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the recording is over."""

    @property
    def current_step(self) -> int:
        """The number of the job's current step; that of the next one where an update has ended this one."""
        return self._step + self._has_pending_end

    def begin(self) -> None:
        """Begins now, without waiting for a model call."""
        self._guarded(self._begin_if_due)

    def step(self) -> None:
        """Ends a step of a job that marks its own steps; from then on optimizers no longer end steps."""
        self._has_manual_steps = True
        self._guarded(self._step_or_begin)
        self._stop_job_if_asked()

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """Ends the recording immediately and removes every hook."""
        self._guarded(lambda: self._finish(reason, error))

    def may_finish_here(self) -> bool:
        """Whether `finish` ends no profiler session of another thread, which only that thread may end."""
        return self._observation is None or self.is_closed or self._observation.is_mine()

    def abandon(self) -> None:
        """Removes everything in a forked child, leaving the parent's recording alone."""
        if self._observation is not None:
            self._observation.abandon()
        self._remove()

    # -- what the job does --------------------------------------------------------------------------------------

    @abstractmethod
    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before a module call; returns the token for `_leave`, None for a call that is not observed."""

    def _leave(self, call: Any, error: BaseException | None) -> None:
        try:
            if error is not None:
                remove_own_frames(error)
            if self._observation is not None and not self.is_closed:
                self._observation.close_call(call, error)
        except Exception as fault:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(fault)

    def _begin_backward(self, goes_on: bool) -> object:
        """Begins recording a job that trains tensors; returns a token if the step ends with this backward."""
        if self._observation is None and not self.failure and not live_objects(torch.optim.Optimizer):
            self._is_bare = True
            self._guarded(self._begin_bare)
        return None if goes_on or not self._is_bare else self

    def _begin_bare(self) -> None:
        self._begin_if_due()

    def _leave_bare(self, observation: ObservationT) -> None:
        """Ends the step in which a job that began with tensors alone meets its model, whose steps are other ones."""
        self._is_bare = False
        self._end_step(observation)

    def _end_backward(self, token: object, error: BaseException | None) -> None:
        observation = self._observation
        if token is not None and error is None and self._is_bare and observation is not None and self._is_observed():
            self._guarded(lambda: self._end_bare(observation))
            self._stop_job_if_asked()

    def _end_bare(self, observation: ObservationT) -> None:
        self._end_step(observation)

    @abstractmethod
    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Called before an optimizer updates."""

    def _note_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._observation is None or self._is_observed():
            self._rounds.begin_update(optimizer)
        if self._is_bare and self._observation is not None and self._is_observed():
            self._leave_bare(self._observation)
        if self._observation is None:
            self._guarded(lambda: self._note_state(optimizer))
        self._before_update(optimizer, args, kwargs)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._plan is not None:
            self._plan.after_update(optimizer)
        self._guarded(lambda: self._end_update(optimizer))
        self._stop_job_if_asked()

    @abstractmethod
    def _make_way(self) -> None:
        """Yields to a profiler session that the job begins in this thread, or has the observed thread yield."""

    # -- steps --------------------------------------------------------------------------------------------------

    def _note_outermost(self, module: torch.nn.Module) -> None:
        """Notes whether the job calls its models outside compiled calls. Graphs made by torch.compile do not count."""
        is_within = is_within_compiled_call()
        if not (is_within and isinstance(module, torch.fx.GraphModule)):
            self._is_called_outside = not is_within

    def _step_or_begin(self) -> None:
        if self._observation is None:
            self._begin_if_due()
        elif self._is_observed():
            self._end_step(self._observation)

    def _end_update(self, optimizer: Any) -> None:
        observation = self._observation
        if observation is not None:
            if not self._is_observed():
                return
            observation.end_update()
        elif self._updated_nothing(optimizer):
            self._rounds.cancel_update(optimizer)
            return
        ends = self._rounds.update(optimizer)
        if ends and self._step == 0:  # others may have been created since recording began
            ends = not self._rounds.meet(live_objects(torch.optim.Optimizer))
        if ends and observation is None:
            self._begin_if_due(first_step=1)  # a job without modules: recording begins with its second step
        elif ends and observation is not None and not self._has_manual_steps:
            self._has_pending_end = True
            self._end_step_if_possible(observation)

    def _note_state(self, optimizer: Any) -> None:
        self._before_first = state_of_update(optimizer)

    def _updated_nothing(self, optimizer: Any) -> bool:
        """Whether an update before recording has had no effect: a schedule drawn before training steps like that."""
        now = state_of_update(optimizer)
        return not now[0] and now == self._before_first

    def _end_step_if_possible(self, observation: ObservationT) -> None:
        """Ends the step unless backward or a compiled update is running; otherwise the next call of a model does.

        The engine holds the profiler's session during backward, and a compiled call restores the keys of the modes that
        were there at its start.
        """
        if torch._C._current_graph_task_id() == -1 and not (self._is_called_outside and is_within_compiled_call()):
            self._end_step(observation)

    @abstractmethod
    def _end_step(self, observation: ObservationT) -> None:
        """Ends the current step, and begins the next one or closes the window."""

    # -- life ---------------------------------------------------------------------------------------------------

    def _begin_if_due(self, first_step: int = 0) -> None:
        """Begins in this thread, unless the recording has begun, has failed or is over, or this process loads data."""
        if self._observation is not None or self.failure or self.is_closed:
            return
        if is_loader_worker():
            self._remove()
            return
        if not self._beginning.acquire(blocking=False):
            return  # another thread was first
        self._step = first_step
        self._rounds.meet(live_optimizers(is_late=self._is_late))
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Creates the observation and begins its first step."""

    def _finish(self, reason: str, error: BaseException | None) -> None:
        failed, full = find_out_of_memory(error), describe_full_sharing(error)
        if self._observation is None and error is not None and (failed is not None or full):
            write_unrecorded(self._folder.parent / f"out-of-memory-{os.getpid()}.json", failed or error, full)
        elif full and self._observation is not None:
            self._observation.note(full)
        self._close_for_good(reason, error, failed)
        self._remove()
        clear_leftovers()

    @abstractmethod
    def _close_for_good(self, reason: str, error: BaseException | None, failed: BaseException | None) -> None:
        """Closes the observation, if there is one, at the end of the job.

        Args:
            reason: Why the recording ends.
            error: The error that ends the job.
            failed: The same if memory ran out.
        """

    def _stop_job_if_asked(self) -> None:
        """Ends the job after its window, the way `sys.exit` does."""
        if self._stops_job and not self.failure:
            self._stops_job = False
            if not self._postpones_end():
                end_job()

    def _postpones_end(self) -> bool:
        """Whether the job ends itself later, when it has what it goes on for."""
        return False

    def _is_observed(self) -> bool:
        """Whether the recording is open and this is the observed thread."""
        return self._observation is not None and not self.is_closed and self._observation.is_mine()

    def _note_elsewhere(self, module: torch.nn.Module) -> None:
        """Notes a call that is not observed."""
        if not self.is_closed and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            note_call_elsewhere(module)

    def _remove(self) -> None:
        self._calls.remove()
        self._guard.remove()
        self._table.switch_off()
        self._updates.remove()
        self._backwards.remove()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Stops recording after an internal fault; re-raises the error if it is the job's own."""
        if not self.failure:
            self._give_up(error)
        raise_if_of_job(error)

    def _give_up(self, error: Exception) -> None:
        self.failure = explain_fault(error)
        try:
            write_fault(self.failure, self._observation, self._folder)
            self._remove()
        except Exception as second:  # noqa: BLE001 - a full disk fails twice; the job must not be affected
            self.failure += f"\nand then: {second!r}"


def _abandon(reference: weakref.ref[ProcessRecorder[Any]]) -> None:
    """Keeps a forked child from writing to its parent's recording."""
    recorder = reference()
    if recorder is not None:
        recorder.abandon()
