"""Records a whole run from inside its process at low overhead: counts throughout, events in short stretches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from memprof.phases import follow, unfollow
from memprof.recorder.calls.modules import StoringObserver
from memprof.recorder.compiled.uncompiled import skip_compiling
from memprof.recorder.interfaces import PlanHooks
from memprof.recorder.light.allocators import AllocatorCount
from memprof.recorder.light.observation import LightObservation
from memprof.recorder.light.position import LightCall, Position
from memprof.recorder.memory.live_objects import live_objects
from memprof.recorder.operators import OperatorMode
from memprof.recorder.process_recorder import ProcessRecorder
from memprof.recorder.profiler.sessions import clear_leftovers
from memprof.recorder.thread_observation import ThreadEnd


class LightRecorder(ProcessRecorder[LightObservation]):
    """Records one process from its first model call to its end; the counterpart of `Recorder`."""

    def __init__(self, folder: Path, *, is_late: bool = False, plan: PlanHooks | None = None) -> None:
        """Prepares a recording; the arguments are those of `ProcessRecorder`."""
        super().__init__(folder, is_late=is_late, plan=plan)
        self._count = AllocatorCount()
        self._at: Position | None = None  # with which nested calls may be followed; None under a plan
        self._storing = StoringObserver(self._begin_storing, self._end_storing)
        self._is_over = False
        self._must_step_aside = False
        self._thread_end: ThreadEnd | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Installs the hooks; the job runs unchanged until it calls a model."""
        super().install()
        skip_compiling(OperatorMode.__torch_dispatch__)
        if self._table.is_available:
            self._count.find()
        follow(self._follow_name)
        self._storing.install()

    @property
    def has_operators(self) -> bool:
        """Whether anything was recorded."""
        return self._observation is not None

    @property
    def is_closed(self) -> bool:
        """Whether the recording is over."""
        return self._is_over or bool(self.failure)

    def abandon(self) -> None:
        """Removes everything in a forked child, leaving the parent's recording alone."""
        self._is_over = True
        super().abandon()

    def _close_for_good(self, reason: str, error: BaseException | None, failed: BaseException | None) -> None:
        observation = self._observation
        if observation is not None and self.failure:
            observation.abandon()
        elif observation is not None and not self._is_over:
            if failed is not None:
                observation.end_with(failed)
            observation.close(reason, is_failed=error is not None)
        self._is_over = True

    # -- what the job does --------------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LightCall | None:
        at = self._at
        if at is not None and at.is_quiet and not self._has_pending_end:
            nested = at.open_nested(module)
            if nested is not None:
                return nested
        if self._plan is not None and torch.is_grad_enabled():
            self._plan.before_call(module)
        try:
            if self._observation is None:
                self._begin_if_due()
            observation = self._observation
            if observation is None or not self._is_observed():
                self._note_elsewhere(module)
                return None
            self._make_way_if_due(observation)
            if self._has_pending_end and torch._C._current_graph_task_id() == -1:
                self._end_step(observation)
            elif observation.is_outside and not self._rounds.has_optimizers and not self._has_manual_steps:
                self._end_step_without_optimizer(observation)
            if observation.is_outside:
                self._note_outermost(module)
                if self._is_bare and torch.is_grad_enabled():
                    self._leave_bare(observation)
            self._rounds.note_call()
            return observation.open_call(module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)
            return None

    def _leave(self, call: LightCall, error: BaseException | None) -> None:
        at = self._at
        if error is None and at is not None and at.is_quiet and at.close_nested(call):
            return
        super()._leave(call, error)

    def _follow_name(self) -> None:
        observation = self._observation
        if observation is not None and self._is_observed():
            self._guarded(observation.change_name)

    def _begin_storing(self, phase: int) -> tuple[int, int] | None:
        observation = self._observation
        if observation is None or not self._is_observed():
            return None
        try:
            return observation.begin_storing(phase)
        except Exception as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)
            return None

    def _end_storing(self, before: tuple[int, int], error: BaseException | None) -> None:
        observation = self._observation
        if observation is not None and self._is_observed():
            self._guarded(lambda: observation.end_storing(before))

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._is_observed():
            self._guarded(lambda: self._begin_update(optimizer))

    def _end_with_thread(self) -> None:
        if self._observation is not None and not self.is_closed:
            self.finish("the recorded thread ended")

    def _make_way(self) -> None:
        observation = self._observation
        if observation is None or self.is_closed:
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

    def _begin(self) -> None:
        self._observation = LightObservation(
            self._folder,
            self._rounds,
            self._count,
            self._table,
            is_late=self._is_late,
            has_plan=self._plan is not None,
        )
        self._at = self._observation.at if self._plan is None else None
        self._thread_end = ThreadEnd(self._end_with_thread)
        self._rounds.begin_step()
        self._observation.begin_step(self._step)

    def _begin_update(self, optimizer: Any) -> None:
        assert self._observation is not None
        self._make_way_if_due(self._observation)
        if self._has_pending_end:
            self._end_step_if_possible(self._observation)
        self._observation.begin_update(optimizer)

    def _end_step(self, observation: LightObservation) -> None:
        self._has_pending_end = False
        observation.end_step()
        self._rounds.begin_step()
        self._step += 1
        observation.begin_step(self._step)

    def _end_step_without_optimizer(self, observation: LightObservation) -> None:
        """Ends the step of a job without an optimizer: it is one call of a model."""
        if observation.has_calls and torch._C._current_graph_task_id() == -1:
            self._rounds.meet(live_objects(torch.optim.Optimizer))
            if not self._rounds.has_optimizers:
                self._end_step(observation)

    # -- inside -------------------------------------------------------------------------------------------------

    def _remove(self) -> None:
        super()._remove()
        unfollow(self._follow_name)
        self._storing.remove()
