"""An open recording of a whole run: counts at every module call and update, and stretches with full events."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from memprof.phases import PHASES, named_phase
from memprof.recorder.calls.torch_state import untraced
from memprof.recorder.clock import clock_ns
from memprof.recorder.light.allocators import AllocatorCount, CudaHistory, ExactCount
from memprof.recorder.light.events import Budget, LightEvents, Marks
from memprof.recorder.light.log import LightLog
from memprof.recorder.light.origins import Origins
from memprof.recorder.light.position import HEARD_ALL, TOLD, UNCOUNTED, LightCall, Peaks, Position
from memprof.recorder.log import TOO_MANY_NAMES
from memprof.recorder.machine import describe_process
from memprof.recorder.memory.kept import KeptTensors
from memprof.recorder.memory.out_of_memory import listen_to_allocator
from memprof.recorder.memory.tensor_memory import owned_span
from memprof.recorder.profiler.native import AllocatorTable
from memprof.recorder.profiler.sessions import why_no_session
from memprof.recorder.steps.larger import elements_of
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.window import Window
from memprof.recorder.thread_observation import ThreadObservation
from memprof.trace.files.spool import (
    BACKWARD,
    EVALUATION,
    FLAG_CALL_RECOMPUTE,
    FORWARD,
    LOADING,
    OPTIMIZER,
    OTHER,
    SAVING,
)

_FLUSH_NS = 1_000_000_000
#: Steps of a stretch: the second one starts in the usual state, with the gradients of the step before.
_STRETCH_STEPS = 2
#: With a device's history, the ring of marks is rotated after this many.
_MOST_MARKS = 200_000

_cuda: Any = torch.cuda  # not annotated in torch
_sequence_number = torch._C._autograd._get_sequence_nr
_graph_task = torch._C._current_graph_task_id


class LightObservation(ThreadObservation):
    """Follows one thread, the one that created it, from its first step to its end.

    Attributes:
        at: The open calls, and the position in them.
        failed_at: Phase and module of the innermost call that raised an error, None if none did.
    """

    _log: LightLog

    def __init__(
        self,
        folder: Path,
        rounds: OptimizerRounds,
        count: AllocatorCount,
        table: AllocatorTable,
        *,
        is_late: bool,
        has_plan: bool,
    ) -> None:
        """Opens the recording.

        Args:
            folder: Spool folder of this process.
            rounds: The job's optimizers.
            count: The CPU allocator's count.
            table: The allocator's table: if it is available, native events are complete.
            is_late: Tensors were allocated before the allocator's table was enabled.
            has_plan: The job runs under a plan.

        Raises:
            OSError: The spool cannot be written.
        """
        log = LightLog(folder)
        start = describe_process(Window(0, 1), is_late=is_late)
        start |= {"window": {"skip": 0, "steps": 0, "stop": False}, "can_count": count.is_found}
        super().__init__(log, start, log.main_folder, rounds)
        self.failed_at: tuple[int, int] | None = None
        self._count = count
        self._exact = ExactCount(count, table, is_allowed=not has_plan)
        self._is_exact = False  # the current step was listened to from its start
        self._has_native_events = table.is_available and LightEvents.is_available()
        self._events = LightEvents(log, self._attribute)
        self._device: CudaHistory | None = None
        self._budget = Budget()
        self._peaks = Peaks(log)
        self.at = Position(count, self._inventory.outside, self._peaks)
        self._call_count = self._step_first_call = 0
        self._step_first_closed = 0
        self._stretch_left = 0
        self._stretch_events = 0
        self._step_events = 0  # of the last step in full, or of its last second
        self._marks = Marks()
        self._kept = KeptTensors(log, owned_span, is_whole_run=True)
        self._origins = Origins(log, lambda: self.at.module)
        self._counted_bytes = 0  # at the last statement on what is kept
        self._registry.scan()

    @property
    def step(self) -> int:
        """The current step."""
        return self._peaks.step

    @property
    def is_outside(self) -> bool:
        """Whether no module call is open."""
        return not self.at.calls

    @property
    def has_calls(self) -> bool:
        """Whether the current step has called a model."""
        return self._call_count > self._step_first_call

    # -- steps --------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Begins a step, and a stretch of events if one is due."""
        self._write_remarks()
        if _cuda.is_initialized():
            listen_to_allocator()
            if self._device is None:
                self._end_stretch()
                self._exact.stop()
                self._device = CudaHistory.start(self._log)
        self._peaks.begin_step(step)
        self._step_first_call = self._call_count
        self._step_first_closed = self.at.closed
        self.at.is_evaluating = False
        self._trained.begin_step()
        self._place(OTHER, -1)
        if self._events.is_running:
            self._state_models()
        elif self._device is None and self._has_native_events and self._budget.may_listen():
            self._begin_stretch()
        self._is_exact = not self._events.is_running and self._device is None and self._exact.start(step)
        self._step_start_ns = clock_ns()
        self._sample()
        self._mark()
        # Not where the whole loop runs inside a module call: steps end at nested calls there.
        is_followed = self._events.is_running or self._device is not None
        self.at.is_quiet = not is_followed and not self.at.calls and self._count.is_found

    def end_step(self) -> None:
        """Ends the current step."""
        end_ns = clock_ns()
        self._sample()
        if self._events.is_running:
            since = time.thread_time_ns()
            self._state_optimizers()
            self._step_events = self._events.cut()
            self._stretch_events += self._step_events
            if self._events.is_running:  # otherwise the job's profiler has taken over
                self._peaks.how = HEARD_ALL
            self._budget.spend(since, self._stretch_events)
        else:
            if self._is_exact and self._exact.is_running and self._exact.is_sound:
                self._peaks.how = HEARD_ALL
            events = 0 if self._exact.is_resting else self._step_events
            self._budget.count_step(self.at.closed - self._step_first_closed, events)
        self._write(end_ns, is_complete=True)
        self._log.sample_heap()
        self._origins.end_step()
        if self._kept.is_due(self.step):
            self._state_kept()
        if self._events.is_running:
            self._log.record_in_ring("steps", {"step": self.step, "start_ns": self._step_start_ns, "end_ns": end_ns})
            self._stretch_left -= 1
            if not self._stretch_left:
                self._end_stretch()
        elif self._device is not None and len(self._marks) > _MOST_MARKS:
            self._marks.clear()
            self._log.turn()
        if end_ns - self._log.flushed_ns > _FLUSH_NS:
            self._log.flush()

    def close(self, reason: str, *, is_failed: bool) -> None:
        """Ends the recording for good, at the current position.

        Args:
            reason: Why it ends.
            is_failed: The job ends with an error, inside the current step even if that has done nothing yet.
        """
        self.at.is_quiet = False
        if self._kept.has_counted:
            self._kept.state(self.step, self._origins.take_survivors(self.step))
        self._origins.stop()
        if self._events.is_running and self.is_mine() and _graph_task() == -1:
            self._end_stretch()
            self._peaks.how = HEARD_ALL
        if self.is_mine() and self._exact.is_running:
            if self._is_exact and self._exact.is_sound:
                self._peaks.how = HEARD_ALL
            self._sample()
            self._exact.stop()
        if self._device is not None:
            self._device.finish()
        if is_failed or self.has_calls or self._rounds.updates or not self.step:
            self._sample()
            self._write(clock_ns(), is_complete=False)
        self._failures.note_optimizers()
        if self._log.names_left_out:
            self._log.record("notes", TOO_MANY_NAMES)
        end = {"reason": reason, "time_ns": clock_ns(), "failed_at": self.failed_at}
        self._log.close([*self._remarks.fresh(), ("end", end)])

    def end_with(self, error: BaseException) -> None:
        """Records that the job ends with an out-of-memory error."""
        self._failures.end_with(error, self.step, -1, is_open=True)

    def abandon(self) -> None:
        """Drops the session: the recording failed, or this is a forked child."""
        self.at.is_quiet = False
        self._origins.stop()
        self._inventory.outside.abandon()
        if self.is_mine():
            self._events.abandon()
            self._exact.stop()

    def step_aside(self) -> None:
        """Yields to the job's own profiler: a process can have only one session."""
        self._origins.stop()
        self._exact.stop()
        if self._events.is_running:
            self._end_stretch()
            self._log.record(
                "notes", f"the job's own profiler started in step {self.step}: its remaining events are missing"
            )

    # -- what the job does --------------------------------------------------------------------------------------

    def open_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LightCall:
        """Records the start of a module call."""
        number = self._registry.number(module)
        phase = self._phase_of(module, number)
        if not self.at.calls:
            self.failed_at = None
            if phase != BACKWARD:
                with torch._C.DisableTorchFunction(), untraced():
                    self._peaks.elements += elements_of(args, kwargs) if phase == FORWARD else 0
                    if self._events.is_running:
                        self._inventory.inputs(args, kwargs)
        if self._events.is_running:
            self._state_new_models()
        calls = self.at.calls
        if not calls:
            self._exact.see_threads()
        if calls and self.at.is_quiet:
            self.at.learn(module, number)
        call = LightCall(self._call_count, number, phase, clock_ns(), calls[-1].number if calls else -1)
        self._call_count += 1
        calls.append(call)
        self._move(phase, number)
        return call

    def close_call(self, call: LightCall, error: BaseException | None) -> None:
        """Records the end of a module call, and of nested calls whose end was not reported."""
        calls = self.at.calls
        if call not in calls:
            return
        if error is not None and self.failed_at is None:
            self.failed_at = (self.at.phase, self.at.module)
        while calls.pop() is not call:
            pass
        around = calls[-1] if calls else None
        now = clock_ns()
        self.at.note_clock(now)
        if self._events.is_running and call.number != UNCOUNTED:
            flags = FLAG_CALL_RECOMPUTE if call.phase == BACKWARD else 0
            self._log.calls.extend((call.number, call.module, call.parent, 0, 0, call.enter_ns, now, flags))
        self._move(call.phase if around is None else around.phase, -1 if around is None else around.module)
        if now - self._log.flushed_ns > _FLUSH_NS:
            self._write(now, is_complete=False)
            if self._events.is_running and _graph_task() == -1:
                since = time.thread_time_ns()
                events = self._events.cut()
                self._stretch_events += events
                self._budget.spend(since, self._stretch_events)
            self._log.flush()

    def begin_update(self, optimizer: Any) -> None:
        """Records that an optimizer is about to update; backward is over by then, or the update is part of it."""
        if self.at.base == FORWARD:
            self._place(BACKWARD, -1)
        self.at.is_evaluating = False
        self._move(OPTIMIZER, -1)
        if self._events.is_running:
            self._state_gradients(optimizer)

    def begin_storing(self, phase: int) -> tuple[int, int] | None:
        """Records that the job begins to save or load.

        Returns:
            The phase and the module around it; None within such a call, an update or backward.
        """
        if self.at.base in (SAVING, LOADING, OPTIMIZER) or _graph_task() != -1:
            return None
        around = (self.at.base, self.at.module)
        self._move(phase, -1)
        return around

    def end_storing(self, around: tuple[int, int]) -> None:
        """Records that the job has saved or loaded."""
        self._move(*around)

    def change_name(self) -> None:
        """Records that a phase named by the job begins or ends."""
        if _graph_task() == -1:
            self._move(self.at.base, self.at.module)

    def end_update(self) -> None:
        """Records that an optimizer has updated."""
        self._move(OTHER, -1)

    # -- inside -------------------------------------------------------------------------------------------------

    def _move(self, phase: int, module: int) -> None:
        """Samples the count for the position that the job leaves, and marks the new one."""
        if self._device is None:
            self._peaks.see(self._highest(), self.at.phase, self.at.module)
        else:
            self._sample()
        self._place(phase, module)
        if self._events.is_running or self._device is not None:
            self._mark()

    def _place(self, phase: int, module: int) -> None:
        """Sets the job's position, using the job's own phase name outside training."""
        self.at.base, self.at.phase, self.at.module = phase, phase, module
        if phase in (OTHER, EVALUATION) and (name := named_phase()) and (number := self._log.phase_number(name)) >= 0:
            self.at.phase = len(PHASES) + number

    def _phase_of(self, module: torch.nn.Module, number: int) -> int:
        """Returns the phase of a module call that begins."""
        if _graph_task() != -1:
            return BACKWARD
        if torch.is_grad_enabled():
            self.at.is_evaluating = False
            return FORWARD
        if not self._rounds.has_optimizers:
            return OTHER if named_phase() else FORWARD
        with torch._C.DisableTorchFunction(), untraced():
            self.at.is_evaluating |= not self.at.calls and self._trained.is_trained(module, number)
        return EVALUATION if self.at.is_evaluating else OTHER

    def _state_kept(self) -> None:
        """States which tensors stay; where memory grows, the next steps are followed to find the lines that made them.

        CUDA's own history has the stacks already.
        """
        before, self._counted_bytes = self._counted_bytes, self._counted()
        has_grown = self._kept.state(self.step, self._origins.take_survivors(self.step))
        if self._device is None and (has_grown or 0 < before < self._counted_bytes):
            self._origins.begin(self.step + 1, self._kept.grown)

    def _sample(self) -> None:
        if self._device is None:
            self._peaks.see(self._highest(), self.at.phase, self.at.module)
            self._peaks.end_bytes = self._counted() if self._count.is_found else -1
        elif self.at.module == -1:  # reading a device's allocator takes 20 µs: too slow for every module
            counts = self._device.read()
            self._peaks.see(counts.allocated_bytes, self.at.phase, self.at.module)
            self._peaks.end_bytes = counts.allocated_bytes
            self._peaks.reserved_bytes = max(self._peaks.reserved_bytes, counts.reserved_bytes)
            if counts.new_peak_bytes:
                self._peaks.see(counts.new_peak_bytes, self.at.phase, self.at.module)
                self._peaks.how = TOLD

    def _mark(self) -> None:
        if self._events.is_running or self._device is not None:
            now, sequence = clock_ns(), _sequence_number()
            call = self.at.calls[-1].number if self.at.calls else -1
            self._log.marks.extend((now, self.at.module, self.at.phase, call, sequence))
            self._marks.add(now, sequence, self.at.phase, self.at.module)

    def _attribute(self, moment_ns: int, total: int, node: int) -> None:
        """Attributes the count reported by an allocation to the position where it happened."""
        phase, module = self._marks.place_of(moment_ns, node)
        if total > 0:
            self._peaks.see(total + self._inventory.outside.alive_bytes, phase, module)

    def _highest(self) -> int:
        return self._count.take_high() + self._inventory.outside.alive_bytes

    def _counted(self) -> int:
        return self._count.read() + self._inventory.outside.alive_bytes

    def _begin_stretch(self) -> None:
        since = time.thread_time_ns()
        self._exact.stop()
        if not self._events.start():
            if not self.step:
                self._log.record("notes", f"{why_no_session()} in step 0: its allocations were only counted")
            return
        self._log.turn()
        self._log.record_in_ring("begin", {"step": self.step, "time_ns": clock_ns()})
        self._marks.clear()
        self._stretch_left, self._stretch_events = _STRETCH_STEPS, 0
        with torch._C.DisableTorchFunction(), untraced():
            self._inventory.alive(self._inventory.kept_by_training(), [])  # of others, only the total is known
        self._state_optimizers()
        self._state_models()
        self._budget.spend(since, 0)

    def _end_stretch(self) -> None:
        if self._events.is_running:
            since = time.thread_time_ns()
            self._events.stop()
            self._inventory.outside.is_running = False
            self._log.flush()
            self._marks.clear()
            self._budget.spend(since, 0)

    def _write(self, now_ns: int, *, is_complete: bool) -> None:
        self._peaks.write(
            self._step_start_ns,
            now_ns,
            updates=self._rounds.updates,
            is_complete=is_complete,
            phase_now=self.at.phase,
            module_now=self.at.module,
        )
