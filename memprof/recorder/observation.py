"""One open recording: its streams, its observers, and the steps they are enabled for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from memprof.recorder.calls.call_log import CallLog
from memprof.recorder.calls.operator_rows import OperatorRows
from memprof.recorder.calls.read_values import ReadLog
from memprof.recorder.calls.stacks import StackTable
from memprof.recorder.calls.torch_state import untraced
from memprof.recorder.clock import clock_ns
from memprof.recorder.compiled.generated_modules import GeneratedModules
from memprof.recorder.interfaces import DryRun, Reads
from memprof.recorder.log import RawLog
from memprof.recorder.machine import describe_process
from memprof.recorder.memory.kept import LEAST_STEPS, KeptTensors
from memprof.recorder.notes import Notes, Unused
from memprof.recorder.operators import OperatorMode
from memprof.recorder.profiler.sessions import is_job_profiling
from memprof.recorder.profiler.sources import MemorySources
from memprof.recorder.profiler.timing import OperatorTimes, wait_for_device
from memprof.recorder.sessions import AfterOperator, Sessions
from memprof.recorder.steps.batches import BatchObserver
from memprof.recorder.steps.progress import OpenCall, Progress
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.usages import Usages
from memprof.recorder.steps.window import Watch, Window
from memprof.recorder.thread_observation import ThreadEnd, ThreadObservation
from memprof.trace.files.spool_writer import SpoolWriter

_RECORDING = (Watch.WARM_UP, Watch.RECORDED)


class Observation(ThreadObservation):
    """Observes and logs the steps of one thread: the one that created it.

    Attributes:
        watch: How the current step is observed.
        is_paused: Whether recording is suspended until the next step begins.
        has_ended: The window is over: only larger steps are recorded from then on.
        progress: The job's position within the step.
        calls: Logs module calls.
        reads: Logs the values that the job reads, or replays those of a recording.
    """

    def __init__(
        self,
        folder: Path,
        window: Window,
        rounds: OptimizerRounds,
        module_call: CodeType,
        root_call: CodeType | None,
        *,
        is_late: bool,
        has_native_events: bool,
        on_fault: Callable[[Exception], None],
        on_operator_error: Callable[[], None],
        on_thread_end: Callable[[], None],
        batches: BatchObserver,
        generated: GeneratedModules | None,
        dry: DryRun | None = None,
    ) -> None:
        """Opens the recording.

        Args:
            folder: Spool folder of this process.
            window: Which steps to record.
            rounds: The job's optimizers.
            module_call: Code of the function around every module call.
            root_call: Code of that function while only calls of root models are observed, if that mode is used.
            is_late: Tensors were allocated before the allocator's table was enabled.
            has_native_events: The allocator's table is available, so native events are complete.
            on_fault: Called when logging an operator failed.
            on_operator_error: Called when an operator of the job raised.
            on_thread_end: Called in the observed thread when it ends: no session may outlive its thread.
            batches: Inspects the batches that DataLoaders yield.
            generated: The code that torch.compile generates; None in a dry run.
            dry: The dry run, if the job is one.

        Raises:
            OSError: The spool cannot be written.
        """
        self._thread_end = ThreadEnd(on_thread_end)
        log = RawLog(SpoolWriter(folder))
        super().__init__(log, describe_process(window, is_late=is_late), folder, rounds)
        self.watch = Watch.SKIPPED
        self.is_paused = False
        self.has_ended = False
        self.progress = Progress()
        stacks = StackTable(log, module_call, root_call)
        sources = MemorySources(log, self._inventory.outside, has_native_events=has_native_events)
        self._usages = Usages()
        self._unused = Unused(self._registry, self._usages)
        self.reads: Reads = ReadLog(log) if dry is None else dry.answers
        parts = (dry, generated, self._unused, self.reads)
        self._notes = Notes(log, batches, [part for part in parts if part is not None], dry)
        self.calls = CallLog(
            log, self.progress, stacks, self._registry, self._trained, self._inventory, self._state_new_models
        )
        self._after = AfterOperator(log, sources, self._inventory, rounds, self._usages, self.calls)
        follow = self._after.follow if dry is None else dry.around(log, self._after.follow)
        rows = OperatorRows(log, self.progress, stacks, self._registry, follow)
        mode = OperatorMode(log, rows, on_fault, on_operator_error, self._note_out_of_memory)
        if isinstance(self.reads, ReadLog):
            mode.reads = self.reads
        if dry is not None:
            dry.adopt(mode, rows, self._inventory, sources, log, self._usages)
        if generated is not None:
            generated.adopt(mode, rows)
        self._sessions = Sessions(mode, sources, OperatorTimes(log), self._inventory, generated, is_late=is_late)
        self._registry.scan()
        self._step_first_op, self._last_step = 0, -1  # the last one whose operators were recorded
        self._is_clocked = False
        self._kept = KeptTensors(log, self._inventory.storage_span)
        self._later = KeptTensors(log, self._inventory.storage_span, is_whole_run=True, has_addresses=False)
        self._can_grow = window.steps >= LEAST_STEPS

    @property
    def is_recording(self) -> bool:
        """Whether operators of the current step are recorded."""
        return self.watch in _RECORDING

    @property
    def op_count(self) -> int:
        """Operators logged so far."""
        return self._log.op_count

    @property
    def step_ops(self) -> int:
        """Operators logged in the current step."""
        return self._log.op_count - self._step_first_op

    # -- steps --------------------------------------------------------------------------------------------------

    def begin_step(self, watch: Watch) -> None:
        """Enables the observers for a step that begins now."""
        self._look_at_kept(watch)
        self.watch = watch
        self.is_paused = self._is_clocked = False
        self.progress.begin_step()
        self._trained.begin_step()
        self._usages.begin_step()
        self._step_first_op = self._log.op_count
        if self.is_recording:
            self._sessions.open()
            self._state_models()
        else:
            self._sessions.close()
            if watch is Watch.TIMED and not self._sessions.times.start():
                self._notes.untimed()
        self._write_remarks()
        self._failures.prepare()
        self._log.flush()
        self._after.paused_ns = 0
        if not self.is_recording:
            wait_for_device()
        self._step_start_ns = clock_ns()

    def end_step(self, step: int, *, is_whole: bool = True) -> None:
        """Ends the current step.

        Args:
            step: Its number.
            is_whole: The job's own step has ended as well.
        """
        if not self.is_recording:
            wait_for_device()
        end_ns = clock_ns()
        self._sessions.times.stop()
        self._log.sample_heap()
        if self.is_recording:
            self._state_optimizers()
            self._sessions.sources.cut()
            self._log.sample_rss()
            usages = self._usages.take_news()
            if usages is not None:
                self._log.record("usages", usages)
        # Once the job's own profiler took over, the rest of the step was not recorded, and its duration is longer.
        if self.is_recording:
            is_whole = is_whole and self._sessions.sources.is_open
        elif self.watch is Watch.PLAIN:
            is_whole = not is_job_profiling()
        self._write_step(step, end_ns, self.watch, is_complete=is_whole)

    def rest(self) -> None:
        """Suspends recording until `record_again`: the window is over."""
        if not self.has_ended:  # without marked steps, the window's last is followed by no timed one
            self._look_at_kept(Watch.RESTING)
        self._sessions.close()
        self._sessions.sources.forget()
        self.reads.close()
        self.watch, self.is_paused = Watch.RESTING, False
        if not self.has_ended:
            self.has_ended = True
            self._notes.finish(self._sessions.mode.not_followed)
            self._failures.note_optimizers()
            # Written now, since the job may be killed any time later: the requested recording is complete.
            self._log.record("end", {"reason": "the window is over", "time_ns": clock_ns()})
        self._failures.release()
        self._log.flush()

    def begin_clocked(self) -> None:
        """Starts the clock in a step after the window, in which only calls of root models are observed."""
        self._is_clocked = True
        self.progress.begin_step()
        self._step_first_op = self._log.op_count
        self._after.paused_ns = 0
        wait_for_device()
        self._step_start_ns = clock_ns()

    def end_resting(self, step: int) -> None:
        """Ends a step after the window: writes the time of a clocked one, and states what has become more, if due."""
        if self._is_clocked:
            self._is_clocked = False
            wait_for_device()
            self._write_step(step, clock_ns(), Watch.PLAIN, is_complete=not is_job_profiling())
        if self._log.sample_heap():
            self._log.flush()  # a job that is killed later has these
        if self._can_grow and self._later.is_due(step):  # after the clock was read: it takes time
            self._later.state(step)

    def write_later_peak(self, record: dict[str, Any]) -> None:
        """Writes the highest peak of a device after the window."""
        self._log.record("later_peak", record)

    def record_again(self) -> None:
        """Resumes recording after `rest`, once the allocator's table is enabled again."""
        self._sessions.is_late = True
        self.begin_step(Watch.RECORDED)

    def look_at(self, module: torch.nn.Module) -> int:
        """Returns the number of a model called outside backward, -1 for any other call."""
        return -1 if torch._C._current_graph_task_id() != -1 else self._registry.root_number(module)

    @property
    def root_ids(self) -> Container[int]:
        """Addresses of the root models, kept up to date."""
        return self._registry.root_ids

    def pause(self) -> None:
        """Suspends recording and discards the current step so far: it starts over on resume."""
        if self.is_recording:
            self._log.record("pauses", {"op": self._step_first_op, "time_ns": self._step_start_ns})
            self._sessions.close()
        self._sessions.times.abandon()
        self.watch, self.is_paused = Watch.SKIPPED, True

    def close(self, step: int, reason: str, *, is_inside_step: bool, is_idle: bool = False) -> None:
        """Ends the recording for good.

        Args:
            step: The number of the current step.
            reason: Why it ends.
            is_inside_step: The current step has begun.
            is_idle: It has called neither a model nor an optimizer: what ran belongs to the step before.
        """
        end_ns = clock_ns()
        self.reads.close()
        self._sessions.close_operators()
        is_last = is_inside_step and self.is_recording and self.step_ops > 0
        if torch._C._current_graph_task_id() == -1 and self.is_mine():
            self._sessions.times.stop()
            if is_last:  # after the last update, as in an evaluation: nothing else tells what this memory is
                self._state_optimizers()
            self._sessions.sources.stop()
        if self.watch is Watch.RECORDED:
            self._state_kept(step)
        elif self.watch is Watch.RESTING and self._later.has_counted:
            self._later.state(step)
        is_idle = is_idle and self.progress.is_idle and 0 <= self._last_step == step - 1 and not self.has_ended
        if is_last and not is_idle:
            self._write_step(step, end_ns, self.watch, is_complete=False)
        self.watch = Watch.CLOSED
        self._notes.finish(self._sessions.mode.not_followed)
        self._sessions.sources.forget()
        if not self.has_ended:
            self._failures.note_optimizers()
        self._failures.release()
        end = [] if self.has_ended else [("end", {"reason": reason, "time_ns": end_ns, "is_idle": is_idle})]
        self._log.close([*self._remarks.fresh(), *end])

    def give_up(self, fault: str) -> None:
        """Ends a recording that failed; sessions started inside backward wait for `abandon`."""
        self._sessions.mode.is_on = False
        super().give_up(fault)

    def abandon(self) -> None:
        """Ends the sessions still open on this thread, without logging."""
        self.watch = Watch.CLOSED
        self.reads.close()
        if threading.get_ident() == self.thread:
            self._sessions.abandon()

    def step_aside(self, step: int) -> None:
        """Yields to the job's own profiler, which would see every operator twice and end our session."""
        if self._sessions.times.is_running:
            self._sessions.times.stop()
            self._log.times.clear()
            self._notes.untimed()
        if self._sessions.make_way():
            self.note(f"the job's own profiler started in step {step}: recording was suspended until it ended")

    def end_with(self, error: BaseException, step: int) -> None:
        """Records that the job ends with an out-of-memory error, wherever it was raised."""
        is_open = self.watch is not Watch.CLOSED
        last_op = self._log.op_count - 1 if is_open and self.is_recording and self.step_ops else -1
        self._failures.end_with(error, step if is_open else -1, last_op, is_open=is_open)

    def note(self, sentence: str) -> None:
        """Writes a note for the reader of the trace, once."""
        self._notes.add(sentence)

    def is_mine(self) -> bool:
        """Whether this is the observed thread, or a device thread running its backward."""
        if super().is_mine():
            return True
        return torch._C._current_graph_task_id() != -1 and self._sessions.mode.is_here()

    # -- what the job does --------------------------------------------------------------------------------------

    def close_call(self, call: OpenCall, error: BaseException | None) -> None:
        """Records the end of a module call, and of nested calls whose end was not reported."""
        self.calls.close(call)

    def begin_update(self, optimizer: Any) -> None:
        """Records that an optimizer is about to update."""
        if self.is_recording:
            self.progress.begin_optimizer()
            self._state_gradients(optimizer)
            with torch._C.DisableTorchFunction():
                self._unused.before_update(optimizer)
                self._usages.begin_update(optimizer, lambda parameter: self._registry.parameter(parameter)[1])

    def end_update(self) -> None:
        """Records that an optimizer has updated."""
        if self.is_recording:
            self.progress.end_optimizer()

    def _note_out_of_memory(self, error: BaseException) -> None:
        """Flushes everything to disk: the job may end or be killed now."""
        self._failures.free_reserve()
        with torch._C.DisableTorchFunction(), untraced():
            self._inventory.models()  # including the gradients that exist by now
        self._state_optimizers()
        self._after.cut_outside_backward()
        self._failures.note(error)
        self._failures.note_optimizers()

    # -- inside -------------------------------------------------------------------------------------------------

    def _look_at_kept(self, following: Watch) -> None:
        """Counts what Python holds after the first step, and states what holds more of it after the last."""
        if not self.is_recording or not self.op_count:
            return
        if self.watch is Watch.RECORDED and following is not Watch.RECORDED:
            self._sessions.close()  # first: garbage that the search sets a collection off for lives on in the recording
            self._state_kept(self._last_step)
        elif self._can_grow and not self._kept.has_counted:
            self._kept.count()
        elif self._can_grow:
            self._kept.begin_step()

    def _state_kept(self, step: int) -> None:
        if self._kept.has_counted:
            self._kept.state(step)
        with torch._C.DisableTorchFunction(), untraced():
            trained = self._inventory.kept_by_training(
                lambda root: self._trained.is_trained(root, self._registry.number(root))
            )
            self._kept.state_idle(step, trained)

    def _write_step(self, step: int, end_ns: int, watch: Watch, *, is_complete: bool) -> None:
        self._last_step = step if watch in _RECORDING else self._last_step
        progress = self.progress
        self._log.record(
            "steps",
            {
                "step": step,
                "kind": watch.value,
                "start_ns": self._step_start_ns,
                "end_ns": end_ns,
                "paused_ns": self._after.paused_ns,
                "first_op": self._step_first_op,
                "end_op": self._log.op_count,
                "updates": self._rounds.updates,
                "members": self._rounds.members,
                "micro_batches": progress.backward_rounds + progress.was_backward,
                "is_complete": is_complete,
            },
        )
