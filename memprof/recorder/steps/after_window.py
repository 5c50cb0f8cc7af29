"""Goes on after the window: looks at what models are called with, and has steps with larger inputs recorded."""

from __future__ import annotations

from typing import Any

import torch

from memprof.recorder.calls.modules import ModuleCallObserver
from memprof.recorder.calls.untraced import untraced
from memprof.recorder.observation import Observation
from memprof.recorder.profiler.kineto import kineto
from memprof.recorder.profiler.native import AllocatorTable
from memprof.recorder.profiler.profiler_guard import ProfilerGuard
from memprof.recorder.profiler.sessions import can_open_files, is_job_profiling
from memprof.recorder.steps.larger import LargerSteps, Move, elements_of
from memprof.recorder.steps.window import Watch

_cuda: Any = torch.cuda  # not annotated in torch

#: More operators than these of one step are not recorded after the window: it is an evaluation without an end.
_MOST_OPS = 200_000


class AfterWindow:
    """Rests after the window, where it sees the calls of whole models alone, and records again where one is larger.

    Between recorded steps nothing of memprof runs but a look at each call of a model and a count of updates.
    """

    def __init__(self, calls: ModuleCallObserver, guard: ProfilerGuard, table: AllocatorTable) -> None:
        """Takes what is in place while steps are recorded.

        Args:
            calls: Observes module calls; those of models alone between recorded steps.
            guard: Makes way for the job's profiler.
            table: The allocator's table of live blocks.
        """
        self._calls = calls
        self._guard = guard
        self._table = table
        self._larger = LargerSteps()
        self._again: list[int] = []
        self._parts: list[int] = []

    def look(self, observation: Observation, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Notes what a model is called with, and begins to record where that is larger than all that was recorded.

        Args:
            observation: The recording.
            module: What is called; only models count, outside backward.
            args: What it is called with.
            kwargs: And by name.

        Returns:
            Whether enough is recorded of the step under way, which is to be ended here in the recording.
        """
        root = observation.look_at(module)
        if root < 0:
            return False
        with torch._C.DisableTorchFunction(), untraced():
            elements = elements_of(args, kwargs)
        trains = torch.is_grad_enabled()
        is_recording = observation.watch is Watch.RECORDED
        move = self._larger.see(root, elements, trains=trains, is_recording=is_recording)
        if move is Move.BEGIN and observation.watch is Watch.RESTING and _may_record():
            self._larger.begin(root, trains=trains)
            self._record_again(observation)
        if not (is_recording and observation.has_ended) or observation.progress.calls:
            return False
        return move is Move.END or observation.step_ops > _MOST_OPS

    def begins_step(self, observation: Observation, module: torch.nn.Module) -> bool:
        """Whether a call begins a step after the window of a job that has no optimizer to tell."""
        root = observation.look_at(module) if observation.watch is Watch.RESTING else -1
        return root >= 0 and self._larger.begins_step(root)

    def end_part(self, observation: Observation, step: int) -> None:
        """Ends the part of a step that is recorded, before the step is over in the job."""
        observation.end_step(step, is_whole=False)
        self._parts.append(step)
        self._larger.end_evaluation()
        self.rest(observation)

    def end_step(self, observation: Observation, step: int, *, is_recorded: bool) -> None:
        """Notes that a step is over in the job.

        Args:
            observation: The recording.
            step: The step's number.
            is_recorded: It was recorded, and its end, too.
        """
        self._larger.end_step(step, is_recorded=is_recorded, is_over=observation.has_ended)
        if is_recorded and observation.has_ended:
            self._again.append(step)

    def begin_step(self, observation: Observation) -> None:
        """Begins a step after the window; where one before it was larger and could not be recorded, this one is."""
        if observation.watch is not Watch.RESTING:
            self.rest(observation)
        if self._larger.wants_step and _may_record():
            self._larger.begin_step()
            self._record_again(observation)

    def rest(self, observation: Observation) -> None:
        """Records nothing, and looks at models alone, from here on."""
        observation.rest()
        self._calls.install_for(observation.root_ids)
        self._guard.remove()
        self._table.switch_off()

    def write_notes(self, observation: Observation, step: int) -> None:
        """Writes at the end which steps were recorded after the window, and which was larger and was not."""
        if observation.has_ended:
            for steps, how in (
                (self._again, "recorded after the window for their inputs, from the first call of a model on"),
                (self._parts, "in part recorded after the window: a batch of an evaluation, for its inputs"),
            ):
                if steps:
                    observation.note(f"{'step' if len(steps) == 1 else 'steps'} {_listed(steps)}: {how}")
            self._larger.end_step(step, is_recorded=observation.watch is Watch.RECORDED, is_over=True)
            sentence = self._larger.sentence()
            if sentence:
                observation.note(sentence)

    def _record_again(self, observation: Observation) -> None:
        self._table.switch_on(is_late=True)  # what was taken meanwhile is followed by weak references
        self._guard.install()
        self._calls.install()
        observation.record_again()


def _listed(steps: list[int]) -> str:
    return ", ".join(str(step) for step in steps)


def _may_record() -> bool:
    """Whether a recording may begin here without being in the way of the job, or being in part of it only."""
    if torch._C._current_graph_task_id() != -1 or not kineto().can_tell or is_job_profiling() or not can_open_files():
        return False
    return not (_cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
