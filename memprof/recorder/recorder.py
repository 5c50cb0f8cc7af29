"""Records a training job from inside its process: waits for training, then drives the observation step by step."""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memprof.recorder.calls.construction import is_within_constructor
from memprof.recorder.calls.modules import ModuleCallObserver
from memprof.recorder.calls.tracebacks import clean_uncaught, remove_own_frames
from memprof.recorder.calls.untraced import untraced
from memprof.recorder.faults import explain_fault, raise_if_of_job, write_fault
from memprof.recorder.memory.live_objects import live_objects, live_optimizers
from memprof.recorder.memory.out_of_memory import find_out_of_memory, write_unrecorded
from memprof.recorder.observation import Observation
from memprof.recorder.operators import OperatorMode, skip_compiling
from memprof.recorder.plan_hooks import PlanHooks
from memprof.recorder.profiler.native import AllocatorTable
from memprof.recorder.profiler.profiler_guard import ProfilerGuard
from memprof.recorder.profiler.sessions import clear_leftovers, is_job_profiling
from memprof.recorder.steps.after_window import AfterWindow
from memprof.recorder.steps.aside import StepsAside
from memprof.recorder.steps.batches import BatchObserver
from memprof.recorder.steps.job_end import end_job
from memprof.recorder.steps.progress import OpenCall
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.update_hooks import UpdateHooks
from memprof.recorder.steps.window import Watch, Window

if TYPE_CHECKING:
    from memprof.recorder.dry.run import DryRun

#: A job without optimizer and backward has no steps: one window of this many operators is recorded.
_ONE_WINDOW_OPS = 200_000


class Recorder:
    """Records one process. Call `install` once torch is imported; recording starts when a model is first called.

    An internal failure ends the recording, which states the reason; the job continues. Only exceptions that interrupt
    the job itself (KeyboardInterrupt, SystemExit) propagate.

    Attributes:
        failure: Traceback of the fault that ended the recording, or the limit that was hit; "" while there is none.
    """

    def __init__(
        self,
        folder: Path,
        window: Window,
        *,
        is_late: bool = False,
        plan: PlanHooks | None = None,
        dry: DryRun | None = None,
    ) -> None:
        """Prepares a recording.

        Args:
            folder: Spool folder of this process; created when the recording begins.
            window: Which steps to record.
            is_late: Tensors were allocated before this recorder was created.
            plan: The plan to run the job under; called for its module calls and updates.
            dry: The dry run, if the job is one.
        """
        self.failure = ""
        self._folder = folder
        self._window = window
        self._is_late = is_late
        self._plan = plan
        self._dry = dry
        self._table = AllocatorTable()
        self._rounds = OptimizerRounds()
        self._calls = ModuleCallObserver(self._enter, self._leave, finds_roots=window.goes_on)
        self._guard = ProfilerGuard(self._make_way)
        self._after = AfterWindow(self._calls, self._guard, self._table) if window.goes_on else None
        self._updates = UpdateHooks(self._before_update, self._after_update)
        self._batches = BatchObserver()
        self._observation: Observation | None = None
        self._step = 0
        self._beginning = threading.Lock()  # acquired once, by the thread that is then observed
        self._has_manual_steps = False
        self._has_pending_end = False
        self._waits_for_training = False
        self._stops_job = False
        self._aside = StepsAside()

    # -- life ---------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Installs the hooks; the job runs unchanged until it calls a model."""
        skip_compiling(
            OperatorMode.__torch_dispatch__,
            Recorder._enter,
            Recorder._leave,
            Recorder._before_update,
            Recorder._after_update,
            UpdateHooks._call_before,
            UpdateHooks._call_after,
        )
        self._table.switch_on(is_late=self._is_late)
        self._calls.install()
        self._guard.install()
        self._updates.install()
        self._batches.install()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_abandon, weakref.ref(self)))

    @property
    def has_operators(self) -> bool:
        """Whether any operator was logged."""
        return self._observation is not None and self._observation.op_count > 0

    @property
    def is_closed(self) -> bool:
        """Whether the window is over."""
        return self._observation is not None and self._observation.watch is Watch.CLOSED

    def begin(self) -> None:
        """Begins now, without waiting for a model call."""
        try:
            if self._observation is None and not self.failure:
                self._begin()
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def step(self) -> None:
        """Ends a step of a job that marks its own steps; from then on optimizers no longer end steps."""
        self._has_manual_steps = True
        try:
            if self._observation is None:
                self.begin()
            elif self._is_observed():
                self._end_step(self._observation)
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)
        self._stop_job_if_asked()

    def pause(self) -> None:
        """Suspends recording until `resume`: what runs between two steps belongs to neither."""
        try:
            if self._observation is not None and self._is_observed():
                self._observation.pause()
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def resume(self) -> None:
        """Restarts the current step after `pause`."""
        try:
            if self._observation is not None and self._is_observed() and self._observation.is_paused:
                self._begin_step(self._observation)
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """Ends the recording immediately and removes every hook.

        Args:
            reason: Why it ends.
            error: The error that ends the job, None if it ends normally.
        """
        try:
            failed = find_out_of_memory(error)
            if failed is not None and self._observation is not None:
                self._observation.end_with(failed, self._step)
            elif failed is not None:
                write_unrecorded(self._folder.parent / f"out-of-memory-{os.getpid()}.json", failed)
            if self._observation is not None:
                if self.failure:
                    self._observation.drop_sessions()
                elif not self.is_closed:
                    self._write_last_notes(self._observation)
                    self._observation.close(self._step, reason, is_inside_step=True)
            self._remove()
            clear_leftovers()
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def abandon(self) -> None:
        """Removes everything in a forked child, leaving the parent's recording alone."""
        if self._observation is not None:
            self._observation.drop_sessions()
            self._observation.watch = Watch.CLOSED
        self._remove()

    # -- what the job does --------------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        call = None
        if self._plan is not None and torch.is_grad_enabled():
            self._plan.before_call(module)
        try:
            if self._observation is None and not self.failure and self._should_begin():
                self._begin()
            observation = self._observation
            if observation is None or not self._is_observed():
                return None
            self._make_way_if_due(observation)
            if self._has_pending_end:
                self._end_step_if_possible(observation)
            self._aside.has_begun = True
            if not observation.progress.calls and torch._C._current_graph_task_id() == -1:
                observation.progress.leave_backward()
                self._end_step_without_optimizer(observation)
            if self._after is not None and self._after.begins_step(observation, module) and not self._tells_steps():
                self._end_step(observation)
            if self._after is not None and self._after.look(observation, module, args, kwargs):
                self._after.end_part(observation, self._step)
            self._rounds.note_call()
            if observation.is_recording:
                with untraced():
                    call = observation.open_call(module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)
            return None
        self._stop_job_if_asked()
        return call

    def _leave(self, call: OpenCall, error: BaseException | None) -> None:
        try:
            if error is not None:
                remove_own_frames(error)
            if self._observation is not None:
                self._observation.close_call(call)
        except Exception as fault:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(fault)

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            observation = self._observation
            if observation is not None and self._is_observed():
                self._make_way_if_due(observation)
                if self._has_pending_end:
                    self._end_step_if_possible(observation)
                self._aside.has_begun = True
                observation.begin_update(optimizer)
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._plan is not None:
            self._plan.after_update(optimizer)
        try:
            observation = self._observation
            if observation is not None and not self._is_observed():
                return
            if observation is not None:
                observation.end_update()
            ends = self._rounds.update(optimizer)
            if ends and self._step == 0:  # others may have been created since recording began
                ends = not self._rounds.meet(live_objects(torch.optim.Optimizer))
            if observation is None:
                if ends and not self.failure:  # a job without modules: recording begins with its second step
                    self._begin(first_step=1)
            elif ends and not self._has_manual_steps:
                self._has_pending_end = True
                self._end_step_if_possible(observation)
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)
        self._stop_job_if_asked()

    def _end_with_thread(self) -> None:
        try:
            if self._observation is not None and not self.failure and not self.is_closed:
                self._observation.close(self._step, "the recorded thread ended", is_inside_step=True)
                self._remove()
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def _make_way(self) -> None:
        """Yields to a profiler session that the job begins in this thread, or has the observed thread yield."""
        try:
            observation = self._observation
            if observation is None or self.is_closed or self._dry is not None:
                return
            self._aside.is_due = self._aside.is_lost = True
            if self._is_observed():
                observation.step_aside(self._step)
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def _make_way_if_due(self, observation: Observation) -> None:
        """Yields if the job's profiler started in another thread; restarts the step once the session is over."""
        if not self._aside.is_due:
            return
        observation.step_aside(self._step)
        if torch._C._current_graph_task_id() == -1 and not is_job_profiling():
            self._aside.is_due = False
            if not self._aside.has_begun and not observation.is_paused:
                self._begin_step(observation)

    # -- steps --------------------------------------------------------------------------------------------------

    def _tells_steps(self) -> bool:
        """Whether the job marks the end of its steps: by optimizer updates, or explicitly."""
        return self._rounds.has_optimizers or self._has_manual_steps

    def _should_begin(self) -> bool:
        if is_within_constructor():
            return False
        if torch.is_grad_enabled():
            return True
        if not self._waits_for_training:
            # Inference before training is not worth the window; inference alone is.
            self._waits_for_training = bool(live_objects(torch.optim.Optimizer))
        return not self._waits_for_training

    def _begin(self, first_step: int = 0) -> None:
        if not self._beginning.acquire(blocking=False):
            return  # another thread was first
        self._step = first_step
        self._rounds.meet(live_optimizers(is_late=self._is_late))
        self._observation = Observation(
            self._folder,
            self._window,
            self._rounds,
            self._calls.code,
            self._calls.root_code,
            is_late=self._is_late,
            can_hear=self._table.is_available,
            on_fault=self._fail,
            on_operator_error=clean_uncaught,
            on_thread_end=self._end_with_thread,
            batches=self._batches,
            dry=self._dry,
        )
        self._begin_step(self._observation)

    def _begin_step(self, observation: Observation) -> None:
        self._rounds.begin_step()
        self._has_pending_end = False
        self._aside.has_begun = self._aside.is_lost = False
        watch = self._window.watch(self._step - self._aside.moved)
        if watch in (Watch.TIMED, Watch.PLAIN) and not self._tells_steps():
            # Without the dispatch mode, nothing marks the end of such a job's steps.
            watch = Watch.CLOSED if self._after is None else Watch.RESTING
        if watch is Watch.CLOSED:
            self._close(observation, "the window is over")
            self._stops_job = self._window.stop
            return
        if watch is Watch.RESTING and self._after is not None:
            if not observation.has_ended:
                self._note_aside(observation)
            self._after.begin_step(observation)
            return
        if watch is not Watch.PLAIN and self._dry is None and is_job_profiling():
            self._aside.is_due = self._aside.is_lost = True
            watch = Watch.SKIPPED
        observation.begin_step(watch)
        if watch is Watch.PLAIN:
            self._calls.remove()
            self._guard.remove()
            self._table.switch_off()

    def _end_step(self, observation: Observation) -> None:
        if self._aside.is_due:
            observation.step_aside(self._step)
        if observation.watch is not Watch.RESTING:
            observation.end_step(self._step)
        if self._aside.is_lost:
            self._aside.pass_over(self._step, self._window)
        if self._after is not None:
            is_recorded = observation.watch is Watch.RECORDED and not self._aside.is_lost
            self._after.end_step(observation, self._step, is_recorded=is_recorded)
        self._step += 1
        self._begin_step(observation)

    def _end_step_if_possible(self, observation: Observation) -> None:
        """Ends the step unless backward is running: the engine holds the profiler's session during backward."""
        if observation.watch is Watch.PLAIN or torch._C._current_graph_task_id() == -1:
            self._end_step(observation)

    def _end_step_without_optimizer(self, observation: Observation) -> None:
        """Ends the step of a job without an optimizer, when a model is called again after backward."""
        if self._tells_steps() or observation.watch is Watch.RESTING:
            return
        if observation.progress.backward_rounds:
            self._rounds.meet(live_objects(torch.optim.Optimizer))  # created since recording began
            if not self._rounds.has_optimizers:
                self._end_step(observation)
        elif observation.step_ops > _ONE_WINDOW_OPS and not observation.has_ended:
            observation.note(f"the job has no steps: a window of {_ONE_WINDOW_OPS:,} operators was recorded")
            observation.end_step(self._step)
            self._close(observation, "the window is over")

    def _close(self, observation: Observation, reason: str) -> None:
        self._write_last_notes(observation)
        observation.close(self._step, reason, is_inside_step=False)
        self._remove()

    def _write_last_notes(self, observation: Observation) -> None:
        if not observation.has_ended:
            self._note_aside(observation)
        if self._after is not None:
            self._after.write_notes(observation, self._step)

    def _note_aside(self, observation: Observation) -> None:
        for sentence in self._aside.notes():
            observation.note(sentence)

    def _remove(self) -> None:
        self._calls.remove()
        self._guard.remove()
        self._table.switch_off()
        self._updates.remove()
        self._batches.remove()

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

    def _stop_job_if_asked(self) -> None:
        """Ends the job after its window, the way `sys.exit` does."""
        if self._stops_job and not self.failure:
            self._stops_job = False
            end_job()

    def _is_observed(self) -> bool:
        """Whether the recording is open and this is the observed thread."""
        return self._observation is not None and not self.is_closed and self._observation.is_mine()


def _abandon(reference: weakref.ref[Recorder]) -> None:
    """Keeps a forked child from writing to its parent's recording."""
    recorder = reference()
    if recorder is not None:
        recorder.abandon()
