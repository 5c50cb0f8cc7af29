"""Records a training job from inside its process: waits for training, then drives the observation step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from memprof.recorder.calls.modules import is_within_constructor
from memprof.recorder.calls.torch_state import untraced
from memprof.recorder.calls.tracebacks import clean_uncaught
from memprof.recorder.compiled.generated_modules import GeneratedModules
from memprof.recorder.compiled.uncompiled import skip_compiling
from memprof.recorder.interfaces import DryRun, PlanHooks
from memprof.recorder.memory.live_objects import live_objects
from memprof.recorder.observation import Observation
from memprof.recorder.operators import OperatorMode
from memprof.recorder.process_recorder import ProcessRecorder
from memprof.recorder.profiler.sessions import is_job_profiling
from memprof.recorder.steps.after_window import AfterWindow
from memprof.recorder.steps.batches import BatchObserver
from memprof.recorder.steps.loaders import LoaderObserver
from memprof.recorder.steps.progress import OpenCall
from memprof.recorder.steps.rounds import PATIENCE
from memprof.recorder.steps.window import StepsAside, Watch, Window, end_job
from memprof.trace.files.spool import UNTRAINED

#: A job without optimizer and backward has no steps: one window of this many operators is recorded.
_ONE_WINDOW_OPS = 200_000


class Recorder(ProcessRecorder[Observation]):
    """Records a window of steps in full."""

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
        super().__init__(folder, is_late=is_late, plan=plan, finds_roots=window.goes_on)
        self._window = window
        self._dry = dry
        self._after = AfterWindow(self._calls, self._guard, self._table, self._guarded) if window.goes_on else None
        self._batches = BatchObserver(LoaderObserver(measures=dry is not None))
        self._generated = GeneratedModules() if dry is None else None
        self._waits_for_training = False
        self._aside = StepsAside()

    # -- life ---------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Installs the hooks; the job runs unchanged until it calls a model."""
        skip_compiling(OperatorMode.__torch_dispatch__)
        super().install()
        self._batches.install()
        if self._generated is not None:
            self._generated.install()

    @property
    def has_operators(self) -> bool:
        """Whether any operator was logged."""
        return self._observation is not None and self._observation.op_count > 0

    @property
    def is_closed(self) -> bool:
        """Whether the window is over."""
        return self._observation is not None and self._observation.watch is Watch.CLOSED

    def pause(self) -> None:
        """Suspends recording until `resume`: what runs between two steps belongs to neither."""
        self._guarded(self._pause)

    def _pause(self) -> None:
        if self._observation is not None and self._is_observed():
            self._observation.pause()

    def resume(self) -> None:
        """Restarts the current step after `pause`."""
        self._guarded(self._resume)

    def _resume(self) -> None:
        if self._observation is not None and self._is_observed() and self._observation.is_paused:
            self._begin_step(self._observation)

    def _close_for_good(self, reason: str, error: BaseException | None, failed: BaseException | None) -> None:
        observation = self._observation
        if observation is None:
            if self._waits_for_training and not self.failure:
                (self._folder.parent / UNTRAINED).touch()
            return
        if failed is not None:
            observation.end_with(failed, self._step)
        if self.failure:
            observation.abandon()
        elif not self.is_closed:
            self._write_last_notes(observation)
            is_idle = error is None and not self._aside.has_begun
            observation.close(self._step, reason, is_inside_step=True, is_idle=is_idle)

    # -- what the job does --------------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        call = None
        if self._plan is not None and torch.is_grad_enabled():
            self._plan.before_call(module)
        try:
            if self._observation is None and not self.failure and self._should_begin():
                self._begin_if_due()
            observation = self._observation
            if observation is None or not self._is_observed():
                self._note_elsewhere(module)
                return None
            self._make_way_if_due(observation)
            if self._has_pending_end:
                self._end_step_if_possible(observation)
            self._aside.has_begun = True
            if self._dry is not None and not observation.progress.calls and self._dry.is_over():
                self._write_last_notes(observation)
                observation.close(self._step, "its time is over", is_inside_step=True)
                self._remove()
                self._stops_job = True
                self._stop_job_if_asked()
                return None
            if not observation.progress.calls and torch._C._current_graph_task_id() == -1:
                self._note_outermost(module)
                if self._is_bare and torch.is_grad_enabled():
                    self._leave_bare(observation)
                observation.progress.leave_backward()
                self._end_step_without_optimizer(observation)
            if self._after is not None and self._after.begins_step(observation, module) and not self._ends_steps():
                self._end_step(observation)
            if self._after is not None and self._after.look(observation, module, args, kwargs):
                self._after.end_part(observation, self._step)
            self._rounds.note_call()
            if observation.is_recording:
                with untraced():
                    call = observation.calls.open(module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)
            return None
        self._stop_job_if_asked()
        return call

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            observation = self._observation
            if observation is not None and self._is_observed():
                self._make_way_if_due(observation)
                if self._has_pending_end:
                    self._end_step_if_possible(observation)
                self._aside.has_begun = True
                if self._after is not None:
                    self._after.see("optimizer")
                observation.begin_update(optimizer)
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def _postpones_end(self) -> bool:
        return self._dry is not None and self._dry.postpones_end(end_job)

    def _end_with_thread(self) -> None:
        self._guarded(self._close_with_thread)

    def _close_with_thread(self) -> None:
        if self._observation is not None and not self.failure and not self.is_closed:
            self._observation.close(self._step, "the recorded thread ended", is_inside_step=True)
            self._remove()

    def _make_way(self) -> None:
        self._guarded(self._step_aside)

    def _step_aside(self) -> None:
        observation = self._observation
        if observation is None or self.is_closed or self._dry is not None:
            return
        self._aside.is_due = self._aside.is_lost = True
        if self._is_observed():
            observation.step_aside(self._step)

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

    def _ends_steps(self) -> bool:
        """Whether the job marks the end of its steps: by optimizer updates, bare backwards, or explicitly."""
        return self._rounds.has_optimizers or self._has_manual_steps or self._is_bare

    def _should_begin(self) -> bool:
        if is_within_constructor():
            return False
        if torch.is_grad_enabled() or self._dry is not None:  # a dry run saves no time by waiting for training
            return True
        if not self._waits_for_training:
            # Inference before training is not worth the window; inference alone is.
            self._waits_for_training = bool(live_objects(torch.optim.Optimizer))
        return not self._waits_for_training

    def _begin_bare(self) -> None:
        if self._dry is not None:
            self._dry.begin()
        super()._begin_bare()
        if self._observation is not None:
            self._observation.note("each backward ends a step, until a model or an optimizer is used")

    def _end_bare(self, observation: Observation) -> None:
        if observation.is_recording:
            observation.state_leaves()
        super()._end_bare(observation)

    def _leave_bare(self, observation: Observation) -> None:
        self._aside.moved = self._step + 1  # the window begins anew
        super()._leave_bare(observation)

    def _begin(self) -> None:
        self._observation = Observation(
            self._folder,
            self._window,
            self._rounds,
            self._calls.code,
            self._calls.root_code,
            is_late=self._is_late,
            has_native_events=self._table.is_available,
            on_fault=self._fail,
            on_operator_error=clean_uncaught,
            on_thread_end=self._end_with_thread,
            batches=self._batches,
            generated=self._generated,
            dry=self._dry,
        )
        self._begin_step(self._observation)

    def _begin_step(self, observation: Observation) -> None:
        self._rounds.begin_step()
        self._has_pending_end = False
        self._aside.has_begun = self._aside.is_lost = False
        if self._dry is not None:
            self._dry.begin_step(self._step)
        watch = self._window.watch(self._step - self._aside.moved)
        if watch in (Watch.TIMED, Watch.PLAIN) and not self._ends_steps():
            # Without the dispatch mode, nothing marks the end of such a job's steps.
            watch = Watch.CLOSED if self._after is None else Watch.RESTING
        if watch is Watch.CLOSED and self._is_bare and self._step - self._aside.moved < PATIENCE:
            watch = Watch.SKIPPED  # tensors may have been tried out before a model that is yet to be made
        if watch is Watch.CLOSED:
            self._close(observation, "the window is over")
            self._stops_job = self._window.stop
            return
        if watch is Watch.RESTING and self._after is not None:
            if not observation.has_ended:
                self._note_aside(observation)
            self._after.begin_step(observation, self._step)
            is_clocked = self._window.is_clocked(self._step - self._aside.moved) and not is_job_profiling()
            # Without marked steps, each call of the model counts as one after the window.
            if is_clocked and observation.watch is Watch.RESTING and self._ends_steps():
                observation.begin_clocked()
            return
        if watch is not Watch.PLAIN and self._dry is None and is_job_profiling():
            self._aside.is_due = self._aside.is_lost = True
            watch = Watch.SKIPPED
        observation.begin_step(watch)
        observation.reads.begin_step(self._step, is_recorded=observation.is_recording)
        if watch is Watch.PLAIN:
            self._calls.remove()
            self._guard.remove()
            self._table.switch_off()

    def _end_step(self, observation: Observation) -> None:
        if self._aside.is_due:
            observation.step_aside(self._step)
        if observation.watch is not Watch.RESTING:
            observation.end_step(self._step)
        else:
            observation.end_resting(self._step)
        if self._aside.is_lost:
            self._aside.pass_over(self._step, self._window)
        if self._after is not None:
            is_recorded = observation.watch is Watch.RECORDED and not self._aside.is_lost
            self._after.end_step(observation, self._step, is_recorded=is_recorded)
        self._step += 1
        self._begin_step(observation)

    def _end_step_if_possible(self, observation: Observation) -> None:
        if observation.watch is Watch.PLAIN:
            self._end_step(observation)
        else:
            super()._end_step_if_possible(observation)

    def _end_step_without_optimizer(self, observation: Observation) -> None:
        """Ends the step of a job without an optimizer, when a model is called again after backward."""
        if self._ends_steps() or observation.watch is Watch.RESTING:
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
        super()._remove()
        if self._after is not None:
            self._after.remove()
        self._batches.remove()
        if self._generated is not None:
            self._generated.remove()
