"""Continues after the window: checks the inputs of models, and records steps with larger ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.phases import PHASES
from memprof.recorder.calls.modules import ModuleCallObserver, StoringObserver
from memprof.recorder.calls.torch_state import untraced
from memprof.recorder.observation import Observation
from memprof.recorder.profiler.native import AllocatorTable
from memprof.recorder.profiler.profiler_guard import ProfilerGuard
from memprof.recorder.profiler.sessions import is_job_profiling, why_no_file
from memprof.recorder.profiler.torch_library import kineto
from memprof.recorder.steps.larger import LargerSteps, Move, elements_of
from memprof.recorder.steps.peak_watch import BETWEEN, TRAINING, PeakWatch
from memprof.recorder.steps.window import Watch

_cuda: Any = torch.cuda  # not annotated in torch

#: After the window, at most this many operators of a step are recorded: more is an endless evaluation.
_MOST_OPS = 200_000


class AfterWindow:
    """Rests after the window, observing only calls of root models, and records again if an input is larger.

    Between recorded steps memprof only checks each call of a model, counts updates, and reads a peak counter.
    """

    def __init__(
        self,
        calls: ModuleCallObserver,
        guard: ProfilerGuard,
        table: AllocatorTable,
        guarded: Callable[[Callable[[], None]], None],
    ) -> None:
        """Stores the hooks in place while steps are recorded.

        Args:
            calls: Observes module calls; only those of root models between recorded steps.
            guard: Yields to the job's profiler.
            table: The allocator's table of live blocks.
            guarded: Runs what may fail, which ends the recording but not the job.
        """
        self._guarded = guarded
        self._calls = calls
        self._guard = guard
        self._table = table
        self._larger = LargerSteps()
        self._peaks = PeakWatch()
        self._storing = StoringObserver(self._begin_storing, self._end_storing)
        self._observation: Observation | None = None  # while it rests
        self._step = 0
        self._again: list[int] = []
        self._parts: list[int] = []

    def look(self, observation: Observation, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Notes a model's inputs, and starts recording if they are larger than all recorded before.

        Args:
            observation: The recording.
            module: The module called; only root models outside backward count.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            Whether enough of the current step is recorded, so that its recording should end here.
        """
        root, is_recording = observation.look_at(module), observation.watch is Watch.RECORDED
        is_nested = observation.progress.calls or torch._C._current_graph_task_id() != -1
        if root < 0 and (is_nested or not is_recording):
            return False
        trains = torch.is_grad_enabled()
        if observation.watch is Watch.RESTING:
            self.see(TRAINING if trains else "evaluation")
        with torch._C.DisableTorchFunction(), untraced():
            elements = elements_of(args, kwargs)
            kind = self._larger.kind(root, module)
        if kind < 0:
            self._larger.meet(module, elements, trains=trains)
            return False
        move = self._larger.see(
            kind if root < 0 else root, elements, trains=trains, is_recording=is_recording, kind=kind
        )
        if move is Move.BEGIN and observation.watch is Watch.RESTING and _may_record():
            self._larger.begin(kind, trains=trains)
            self._record_again(observation)
        if not (is_recording and observation.has_ended) or observation.progress.calls:
            return False
        return move is Move.END or observation.step_ops > _MOST_OPS

    def begins_step(self, observation: Observation, module: torch.nn.Module) -> bool:
        """Whether a call after the window begins a step, in a job without an optimizer to mark steps."""
        root = observation.look_at(module) if observation.watch is Watch.RESTING else -1
        return root >= 0 and self._larger.begins_step(root)

    def end_part(self, observation: Observation, step: int) -> None:
        """Ends the recorded part of a step before the job's step is over."""
        observation.end_step(step, is_whole=False)
        self._parts.append(step)
        self._larger.end_evaluation()
        self.rest(observation)

    def end_step(self, observation: Observation, step: int, *, is_recorded: bool) -> None:
        """Notes the end of a step of the job.

        Args:
            observation: The recording.
            step: The step's number.
            is_recorded: It was recorded to its end.
        """
        self._larger.end_step(step, is_recorded=is_recorded, is_over=observation.has_ended)
        if is_recorded and observation.has_ended:
            self._again.append(step)

    def see(self, phase: str, *, at_once: bool = False) -> None:
        """Reads the peak counter where a phase begins, while the recording rests; if it is due, or at once."""
        if self._observation is not None:
            for news in self._peaks.look(self._step, phase, at_once=at_once):
                self._observation.write_later_peak(news)

    def begin_step(self, observation: Observation, step: int) -> None:
        """Begins a step after the window; it is recorded if an earlier one was larger and could not be."""
        self._step = step
        if observation.watch is not Watch.RESTING:
            self.rest(observation)
        self.see(BETWEEN)
        if self._larger.needs_step and _may_record():
            self._larger.begin_step()
            self._record_again(observation)

    def rest(self, observation: Observation) -> None:
        """Stops recording, and observes only calls of root models from here on."""
        observation.rest()
        self._calls.install_for(observation.root_ids)
        self._guard.remove()
        self._table.switch_off()
        if self._observation is None:
            self._observation = observation
            self._storing.install()
        self._peaks.restart(self._step)

    def remove(self) -> None:
        """Removes the hooks that are installed while the recording rests."""
        self._observation = None
        self._storing.remove()

    def write_notes(self, observation: Observation, step: int) -> None:
        """Writes at the end which steps were recorded after the window, and which larger one was not."""
        if observation.has_ended:
            for steps, how in (
                (self._again, "recorded after the window for larger inputs, from the first model call on"),
                (self._parts, "in part recorded after the window: an evaluation batch with larger inputs"),
            ):
                if steps:
                    observation.note(f"{'step' if len(steps) == 1 else 'steps'} {_listed(steps)}: {how}")
            self._larger.end_step(step, is_recorded=observation.watch is Watch.RECORDED, is_over=True)
            sentence = self._larger.sentence()
            if sentence:
                observation.note(sentence)
        self.see(BETWEEN, at_once=True)

    def _begin_storing(self, phase: int) -> str | None:
        observation = self._observation
        if observation is None or not observation.is_mine() or self._peaks.phase == PHASES[phase]:
            return None
        before = self._peaks.phase
        self._guarded(lambda: self.see(PHASES[phase]))
        return before

    def _end_storing(self, before: str, _: BaseException | None) -> None:
        self._guarded(lambda: self.see(before))

    def _record_again(self, observation: Observation) -> None:
        self.remove()
        self._table.switch_on(is_late=True)  # memory allocated meanwhile is followed by weak references
        self._guard.install()
        self._calls.install()
        observation.record_again()


def _listed(steps: list[int]) -> str:
    return ", ".join(str(step) for step in steps)


def _may_record() -> bool:
    """Whether recording may begin here without disturbing the job, and without missing part of it."""
    if torch._C._current_graph_task_id() != -1 or not kineto().can_report or is_job_profiling() or why_no_file():
        return False
    return not (_cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
