"""One open recording: its streams, its observers, and the steps they are enabled for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Container
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from memprof.recorder.calls.stacks import StackTable
from memprof.recorder.calls.untraced import untraced
from memprof.recorder.clock import clock_ns
from memprof.recorder.log import TOO_MANY_NAMES, RawLog
from memprof.recorder.machine import describe_process
from memprof.recorder.operators import OperatorMode
from memprof.recorder.profiler.sources import MemorySources
from memprof.recorder.profiler.timed import OperatorTimes, wait_for_device
from memprof.recorder.steps.batches import BatchObserver
from memprof.recorder.steps.progress import OpenCall, Progress
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.usages import Usages
from memprof.recorder.steps.window import Watch, Window
from memprof.recorder.thread_end import ThreadEnd
from memprof.recorder.thread_observation import ThreadObservation
from memprof.trace.files.spool import FLAG_CALL_RECOMPUTE
from memprof.trace.files.spool_writer import SpoolWriter

if TYPE_CHECKING:
    from memprof.recorder.dry.run import DryRun

_FLUSH_NS = 1_000_000_000
_RSS_NS = 20_000_000
_RECORDING = (Watch.WARM_UP, Watch.RECORDED)


class Observation(ThreadObservation):
    """Observes and logs the steps of one thread: the one that created it.

    Attributes:
        watch: How the current step is observed.
        is_paused: Whether recording is suspended until the next step begins.
        has_ended: The window is over: only larger steps are recorded from then on.
        progress: The job's position within the step.
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
        self._is_late = is_late
        self._stacks = StackTable(log, module_call, root_call)
        self._sources = MemorySources(log, has_native_events=has_native_events)
        self._times = OperatorTimes(log)
        self._mode = OperatorMode(
            log,
            self.progress,
            self._stacks,
            self._registry,
            self._after_operator if dry is None else dry.around(log, self._after_operator),
            on_fault,
            on_operator_error,
            self._note_out_of_memory,
        )
        self._has_pending_cut = False
        self._dry = dry
        self._batches = batches
        if dry is not None:
            dry.adopt(self._mode, self._inventory, self._sources, log)
        self._registry.scan()
        self._step_first_op = 0
        self._paused_ns = 0
        self._sampled_rss_ns = 0
        self._has_new_gradients = False
        self._usages = Usages()
        self._is_in_evaluation = False
        self._noted: set[str] = set()

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
        self.watch = watch
        self.is_paused = False
        self.progress.begin_step()
        self._trained.begin_step()
        self._usages.begin_step()
        self._step_first_op = self._log.op_count
        if self.is_recording:
            if not self._sources.is_open:
                self._open_epoch()
            self._state_models()
        else:
            self._slide_out()
            self._sources.stop()
            if watch is Watch.TIMED and not self._times.start():
                self._note_untimed()
        self._write_remarks()
        self._failures.prepare()
        self._log.flush()
        self._paused_ns = 0
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
        self._times.stop()
        if self.is_recording:
            self._state_optimizers()
            self._sources.cut()
            self._log.sample_rss()
            usages = self._usages.take_news()
            if usages is not None:
                self._log.record("usages", usages)
        # Once the job's own profiler took over, the rest of the step was not recorded.
        self._write_step(step, end_ns, is_complete=is_whole and (self._sources.is_open or not self.is_recording))

    def rest(self) -> None:
        """Suspends recording until `record_again`: the window is over."""
        self._slide_out()
        self._sources.stop()
        self._sources.forget()
        self.watch, self.is_paused = Watch.RESTING, False
        if not self.has_ended:
            self.has_ended = True
            self._write_notes()
            self._failures.note_optimizers()
            # Written now, since the job may be killed any time later: the requested recording is complete.
            self._log.record("end", {"reason": "the window is over", "time_ns": clock_ns()})
        self._failures.release()
        self._log.flush()

    def record_again(self) -> None:
        """Resumes recording after `rest`, once the allocator's table is enabled again."""
        self._is_late = True
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
            self._slide_out()
            self._sources.stop()
        self._times.abandon()
        self.watch, self.is_paused = Watch.SKIPPED, True

    def close(self, step: int, reason: str, *, is_inside_step: bool) -> None:
        """Ends the recording for good."""
        end_ns = clock_ns()
        self._slide_out()
        if torch._C._current_graph_task_id() == -1 and self.is_mine():
            self._times.stop()
            self._sources.stop()
        if is_inside_step and self.is_recording and self.step_ops:
            self._write_step(step, end_ns, is_complete=False)
        self.watch = Watch.CLOSED
        self._write_notes()
        self._sources.forget()
        if not self.has_ended:
            self._failures.note_optimizers()
        self._failures.release()
        end = [] if self.has_ended else [("end", {"reason": reason, "time_ns": end_ns})]
        self._log.close([*self._remarks.fresh(), *end])

    def give_up(self, fault: str) -> None:
        """Ends a recording that failed; sessions started inside backward wait for `abandon`."""
        self._mode.is_on = False
        super().give_up(fault)

    def abandon(self) -> None:
        """Ends the sessions still open on this thread, without logging."""
        self.watch = Watch.CLOSED
        if threading.get_ident() == self.thread:
            self._mode.slide_out()
            self._sources.abandon()
            self._times.abandon()

    def step_aside(self, step: int) -> None:
        """Yields to the job's own profiler, which would see every operator twice and end our session."""
        if self._times.is_running:
            self._times.stop()
            self._log.times.clear()
            self._note_untimed()
        if self._sources.is_open:
            self._slide_out()
            self._sources.stop()
            self.note(f"the job's own profiler started in step {step}: recording was suspended until it ended")
        elif self._mode.is_here():  # removed inside backward, and put back by the engine when backward ended
            self._mode.slide_out()

    def end_with(self, error: BaseException, step: int) -> None:
        """Records that the job ends with an out-of-memory error, wherever it was raised.

        Args:
            error: The error.
            step: The current step.
        """
        is_open = self.watch is not Watch.CLOSED
        last_op = self._log.op_count - 1 if is_open and self.is_recording and self.step_ops else -1
        self._failures.end_with(error, step if is_open else -1, last_op, is_open=is_open)

    def note(self, sentence: str) -> None:
        """Writes a note for the reader of the trace, once."""
        if sentence not in self._noted:
            self._noted.add(sentence)
            self._log.record("notes", sentence)

    def is_mine(self) -> bool:
        """Whether this is the observed thread, or a device thread running its backward."""
        if super().is_mine():
            return True
        return torch._C._current_graph_task_id() != -1 and self._mode.is_here()

    # -- what the job does --------------------------------------------------------------------------------------

    def open_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall:
        """Records the start of a module call; called from the function wrapped around the call."""
        progress = self.progress
        is_backward = torch._C._current_graph_task_id() != -1
        outer = progress.calls[-1] if progress.calls else None
        stack = self._stacks.number(sys._getframe(2), outer.stack if outer else -1)
        module_number = self._registry.number(module)
        if outer is None and not is_backward:
            with torch._C.DisableTorchFunction(), untraced():
                is_in_function = self._stacks.is_in_function(stack)
                self._trained.begin_call(progress, module, module_number, is_in_function=is_in_function)
                self._is_in_evaluation = progress.is_eval_mode
                self._inventory.inputs(args, kwargs)
        self._state_new_models()
        call = OpenCall(
            number=self._call_count,
            module=module_number,
            parent=outer.number if outer else -1,
            first_op=self._log.op_count,
            enter_ns=clock_ns(),
            stack=stack,
            is_recompute=is_backward,
        )
        self._call_count += 1
        progress.calls.append(call)
        return call

    def close_call(self, call: OpenCall, error: BaseException | None) -> None:
        """Records the end of a module call, and of nested calls whose end was not reported."""
        calls = self.progress.calls
        if call not in calls:
            return
        while calls.pop() is not call:
            pass
        flags = FLAG_CALL_RECOMPUTE if call.is_recompute else 0
        now_ns, end_op = clock_ns(), self._log.op_count
        self._log.calls.extend(
            (call.number, call.module, call.parent, call.first_op, end_op, call.enter_ns, now_ns, flags)
        )

    def begin_update(self, optimizer: Any) -> None:
        """Records that an optimizer is about to update."""
        if self.is_recording:
            self.progress.begin_optimizer()
            self._state_gradients(optimizer)
            with torch._C.DisableTorchFunction():
                self._usages.begin_update(optimizer)

    def end_update(self) -> None:
        """Records that an optimizer has updated."""
        if self.is_recording:
            self.progress.end_optimizer()

    def _after_operator(self, now_ns: int, is_backward: bool) -> None:
        if now_ns - self._sampled_rss_ns > _RSS_NS:
            self._sampled_rss_ns = now_ns
            self._log.sample_rss()
        if is_backward:
            if not self._has_new_gradients:
                self._begin_backward()
            self._has_new_gradients = True
        elif self._has_new_gradients and torch._C._current_graph_task_id() == -1:
            self._has_new_gradients = False
            if not self._rounds.has_optimizers:  # no other signal that gradients are complete
                self._inventory.model_gradients()
        if self._has_pending_cut and not is_backward and torch._C._current_graph_task_id() == -1:
            self._has_pending_cut = False
            self._sources.cut()
        if now_ns - self._log.flushed_ns > _FLUSH_NS:
            if not is_backward and torch._C._current_graph_task_id() == -1:
                self._sources.cut()
            self._log.flush()
            self._paused_ns += clock_ns() - now_ns

    def _begin_backward(self) -> None:
        self._usages.begin_backward(self._rounds.alive())
        if self._is_in_evaluation:
            self._usages.train_in_evaluation()

    def _note_out_of_memory(self, error: BaseException) -> None:
        """Flushes everything to disk: the job may end or be killed now."""
        self._failures.free_reserve()
        with torch._C.DisableTorchFunction(), untraced():
            self._inventory.models()  # including the gradients that exist by now
        self._state_optimizers()
        if torch._C._current_graph_task_id() == -1:
            self._sources.cut()
        else:
            self._has_pending_cut = True
        self._failures.note(error)
        self._failures.note_optimizers()

    # -- inside -------------------------------------------------------------------------------------------------

    def _write_step(self, step: int, end_ns: int, *, is_complete: bool) -> None:
        progress = self.progress
        self._log.record(
            "steps",
            {
                "step": step,
                "kind": self.watch.value,
                "start_ns": self._step_start_ns,
                "end_ns": end_ns,
                "paused_ns": self._paused_ns,
                "first_op": self._step_first_op,
                "end_op": self._log.op_count,
                "updates": self._rounds.updates,
                "members": self._rounds.members,
                "micro_batches": progress.backward_rounds + progress.was_backward,
                "is_complete": is_complete,
            },
        )

    def _write_notes(self) -> None:
        if self._batches.undivided:
            self._log.record("batches", self._batches.undivided)
        for sentence in self._dry.notes() if self._dry is not None else ():
            self.note(sentence)
        for name in sorted(self._mode.not_followed):
            self.note(f"{name}: this higher-order operator is recorded as one operator, without the operators inside")
        if self._log.names_left_out:
            self.note(TOO_MANY_NAMES)

    def _open_epoch(self) -> None:
        """Starts recording memory events; existing allocations are written first."""
        self._sources.start()
        self._mode.begin_epoch(self._sources.on_output)
        with torch._C.DisableTorchFunction(), untraced():
            self._inventory.held(self._sources.follow if self._is_late else self._sources.remember)
        self._is_late = False  # from now on every allocation is in the allocator's table, which reports its free
        self._mode.slide_in()

    def _slide_out(self) -> None:
        if self._mode.is_on:
            self._mode.slide_out()

    def _note_untimed(self) -> None:
        self.note("the job's own profiler ran in the timed step: operator times are estimates")
