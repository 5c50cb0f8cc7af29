"""Records a whole run from inside its process at low overhead: counts throughout, events in short stretches."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memprof.phases import follow, unfollow
from memprof.recorder.calls.modules import ModuleCallObserver
from memprof.recorder.calls.tracebacks import remove_own_frames
from memprof.recorder.faults import explain_fault, raise_if_of_job, write_fault
from memprof.recorder.light.count import AllocatorCount
from memprof.recorder.light.observation import LightCall, LightObservation
from memprof.recorder.light.thread_end import ThreadEnd
from memprof.recorder.memory.live_objects import live_objects, live_optimizers
from memprof.recorder.memory.out_of_memory import find_out_of_memory, write_unrecorded
from memprof.recorder.operators import skip_compiling
from memprof.recorder.plan_hooks import PlanHooks
from memprof.recorder.profiler.native import AllocatorTable
from memprof.recorder.profiler.profiler_guard import ProfilerGuard
from memprof.recorder.profiler.sessions import clear_leftovers
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.update_hooks import UpdateHooks


class LightRecorder:
    """Records one process from its first model call to its end; the counterpart of `Recorder`.

    An internal failure ends the recording, which states the reason; the job continues. Only exceptions that interrupt
    the job itself (KeyboardInterrupt, SystemExit) propagate.

    Attributes:
        failure: Traceback of the fault that ended the recording, or the limit that was hit; "" while there is none.
    """

    def __init__(self, folder: Path, *, is_late: bool = False, plan: PlanHooks | None = None) -> None:
        """Prepares a recording.

        Args:
            folder: Spool folder of this process; created when the recording begins.
            is_late: Tensors were allocated before this recorder was created.
            plan: As for `Recorder`.
        """
        self.failure = ""
        self._folder = folder
        self._is_late = is_late
        self._plan = plan
        self._table = AllocatorTable()
        self._count = AllocatorCount()
        self._rounds = OptimizerRounds()
        self._calls = ModuleCallObserver(self._enter, self._leave)
        self._guard = ProfilerGuard(self._make_way)
        self._updates = UpdateHooks(self._before_update, self._after_update)
        self._observation: LightObservation | None = None
        self._beginning = threading.Lock()
        self._has_pending_end = False
        self._has_manual_steps = False
        self._is_over = False
        self._must_step_aside = False
        self._thread_end: ThreadEnd | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Installs the hooks; the job runs unchanged until it calls a model."""
        skip_compiling(
            LightRecorder._enter,
            LightRecorder._leave,
            LightRecorder._before_update,
            LightRecorder._after_update,
            UpdateHooks._call_before,
            UpdateHooks._call_after,
        )
        self._table.switch_on(is_late=self._is_late)
        if self._table.is_available:
            self._count.find()
        self._calls.install()
        self._guard.install()
        self._updates.install()
        follow(self._follow_name)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_abandon, weakref.ref(self)))

    @property
    def has_operators(self) -> bool:
        """Whether anything was recorded."""
        return self._observation is not None

    @property
    def is_closed(self) -> bool:
        """Whether the recording is over."""
        return self._is_over

    def begin(self) -> None:
        """Begins now, without waiting for a model call."""
        self._guarded(self._begin_if_due)

    def step(self) -> None:
        """Ends a step of a job that marks its own steps; from then on optimizers no longer end steps."""
        self._has_manual_steps = True
        if self._observation is None:
            self.begin()
        elif self._is_observed():
            self._guarded(self._end_step)

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """Ends the recording immediately and removes every hook.

        Args:
            reason: Why it ends.
            error: The error that ends the job, None if it ends normally.
        """
        try:
            failed = find_out_of_memory(error)
            observation = self._observation
            if observation is None and failed is not None:
                write_unrecorded(self._folder.parent / f"out-of-memory-{os.getpid()}.json", failed)
            if observation is not None and self.failure:
                observation.abandon()
            elif observation is not None and not self._is_over:
                if failed is not None:
                    observation.end_with(failed)
                observation.close(reason, is_failed=error is not None)
            self._is_over = True
            self._remove()
            clear_leftovers()
        except Exception as fault:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(fault)

    def abandon(self) -> None:
        """Removes everything in a forked child, leaving the parent's recording alone."""
        if self._observation is not None:
            self._observation.abandon()
        self._is_over = True
        self._remove()

    # -- what the job does --------------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LightCall | None:
        if self._plan is not None and torch.is_grad_enabled():
            self._plan.before_call(module)
        try:
            if self._observation is None:
                self._begin_if_due()
            observation = self._observation
            if observation is None or not self._is_observed():
                return None
            self._make_way_if_due(observation)
            if self._has_pending_end and torch._C._current_graph_task_id() == -1:
                self._end_step()
            elif observation.is_outside and not self._rounds.has_optimizers and not self._has_manual_steps:
                self._end_step_without_optimizer()
            self._rounds.note_call()
            return observation.enter(module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)
            return None

    def _follow_name(self) -> None:
        observation = self._observation
        if observation is not None and self._is_observed():
            self._guarded(observation.change_name)

    def _leave(self, call: LightCall, error: BaseException | None) -> None:
        try:
            if error is not None:
                remove_own_frames(error)
            if self._observation is not None and not self._is_over:
                self._observation.leave(call, error)
        except Exception as fault:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(fault)

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_observed():
            self._guarded(lambda: self._begin_update(optimizer))

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._plan is not None:
            self._plan.after_update(optimizer)
        if self._observation is None or self._is_observed():
            self._guarded(lambda: self._end_update(optimizer))

    def _end_with_thread(self) -> None:
        if self._observation is not None and not self._is_over:
            self.finish("the recorded thread ended")

    def _make_way(self) -> None:
        """Yields to a profiler session that the job begins in this thread, or has the observed thread yield."""
        observation = self._observation
        if observation is None or self._is_over:
            return
        if self._is_observed():
            self._guarded(observation.step_aside)
        else:
            self._must_step_aside = True

    def _make_way_if_due(self, observation: LightObservation) -> None:
        clear_leftovers()
        if self._must_step_aside:
            self._must_step_aside = False
            observation.step_aside()

    # -- steps --------------------------------------------------------------------------------------------------

    def _begin_if_due(self, first_step: int = 0) -> None:
        if self._observation is not None or self.failure or self._is_over:
            return
        if not self._beginning.acquire(blocking=False):
            return  # another thread was first
        self._rounds.meet(live_optimizers(is_late=self._is_late))
        self._observation = LightObservation(
            self._folder, self._rounds, self._count, is_late=self._is_late, can_hear=self._table.is_available
        )
        self._thread_end = ThreadEnd(self._end_with_thread)
        self._rounds.begin_step()
        self._observation.begin_step(first_step)

    def _begin_update(self, optimizer: Any) -> None:
        assert self._observation is not None
        self._make_way_if_due(self._observation)
        if self._has_pending_end and torch._C._current_graph_task_id() == -1:
            self._end_step()
        self._observation.begin_update(optimizer)

    def _end_update(self, optimizer: Any) -> None:
        if self._observation is not None:
            self._observation.end_update()
        ends = self._rounds.update(optimizer)
        if ends and (self._observation is None or self._observation.step == 0):
            ends = not self._rounds.meet(live_objects(torch.optim.Optimizer))  # created since recording began
        if not ends or self._has_manual_steps:
            return
        if self._observation is None:
            self._begin_if_due(first_step=1)  # a job without modules
        elif torch._C._current_graph_task_id() == -1:
            self._end_step()
        else:
            self._has_pending_end = True  # the engine holds the profiler's session during backward

    def _end_step(self) -> None:
        assert self._observation is not None
        self._has_pending_end = False
        self._observation.end_step()
        self._rounds.begin_step()
        self._observation.begin_step(self._observation.step + 1)

    def _end_step_without_optimizer(self) -> None:
        """Ends the step of a job without an optimizer: it is one call of a model."""
        assert self._observation is not None
        if self._observation.has_calls and torch._C._current_graph_task_id() == -1:
            self._rounds.meet(live_objects(torch.optim.Optimizer))
            if not self._rounds.has_optimizers:
                self._end_step()

    # -- inside -------------------------------------------------------------------------------------------------

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def _is_observed(self) -> bool:
        """Whether the recording is open and this is the observed thread."""
        return self._observation is not None and not self._is_over and self._observation.is_mine()

    def _remove(self) -> None:
        self._calls.remove()
        self._guard.remove()
        self._table.switch_off()
        self._updates.remove()
        unfollow(self._follow_name)

    def _fail(self, error: Exception) -> None:
        """Stops recording after an internal fault; re-raises the error if it is the job's own."""
        if not self.failure:
            self._give_up(error)
        raise_if_of_job(error)

    def _give_up(self, error: Exception) -> None:
        self.failure = explain_fault(error)
        self._is_over = True
        try:
            write_fault(self.failure, self._observation, self._folder)
            self._remove()
        except Exception as second:  # noqa: BLE001 - a full disk fails twice; the job must not be affected
            self.failure += f"\nand then: {second!r}"


def _abandon(reference: weakref.ref[LightRecorder]) -> None:
    """Keeps a forked child from writing to its parent's recording."""
    recorder = reference()
    if recorder is not None:
        recorder.abandon()
