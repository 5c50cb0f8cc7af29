"""Records a training job from inside: decides step by step what is observed, and drives the observers."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memprof.recorder.inventory import Inventory
from memprof.recorder.log import RawLog
from memprof.recorder.machine import describe_process
from memprof.recorder.modules import ModuleCallObserver
from memprof.recorder.native import AllocatorTable, NativeEvents
from memprof.recorder.operators import OperatorMode, skip_compiling
from memprof.recorder.profiler_guard import ProfilerGuard
from memprof.recorder.progress import OpenCall, Progress
from memprof.recorder.registry import ModuleRegistry, live_objects
from memprof.recorder.rounds import OptimizerRounds
from memprof.recorder.stacks import StackTable
from memprof.recorder.timed import OperatorTimes
from memprof.recorder.tracebacks import clean_uncaught, remove_own_frames
from memprof.recorder.watch import StorageWatch
from memprof.recorder.window import Watch, Window
from memprof.trace.spool import FLAG_CALL_RECOMPUTE, SpoolWriter

_FLUSH_NS = 1_000_000_000
_RSS_NS = 20_000_000
#: A job without an optimizer and without backward has no steps: one window of this many operators.
_ONE_WINDOW_OPS = 200_000
_RECORDING = (Watch.WARM_UP, Watch.RECORDED)


class Recorder:
    """Observes one process. `install` once torch is there; it begins by itself when a model is first called.

    Nothing in here raises into the job: what fails ends the recording, and says why in it.
    """

    def __init__(self, folder: Path, window: Window, *, is_late: bool = False, manual_steps: bool = False) -> None:
        """Prepares a recording.

        Args:
            folder: Spool folder of this process; made when the recording begins.
            window: Which steps to record.
            is_late: Tensors were made before this recorder came.
            manual_steps: Steps end where `step` is called, whatever optimizers do.
        """
        self._folder = folder
        self._window = window
        self._is_late = is_late
        self._manual_steps = manual_steps
        self._table = AllocatorTable()
        self._rounds = OptimizerRounds()
        self._progress = Progress()
        self._calls = ModuleCallObserver(self._enter, self._leave)
        self._guard = ProfilerGuard(self._yield_profiler)
        self._hooks: list[Any] = []
        self._thread = 0
        self._watch: Watch | None = None  # None until the recording begins
        self._step = 0
        self._step_start_ns = 0
        self._step_first_op = 0
        self._paused_ns = 0
        self._call_count = 0
        self._has_pending_end = False
        self._is_epoch_open = False
        self._sampled_rss_ns = 0
        self._waits_for_training = False
        self._stops_job = False
        self.failure = ""

    # -- life ---------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Puts the hooks in place; the job runs as before until it calls a model."""
        skip_compiling(
            OperatorMode.__torch_dispatch__,
            Recorder._enter,
            Recorder._leave,
            Recorder._before_update,
            Recorder._after_update,
        )
        self._table.switch_on(is_late=self._is_late)
        self._calls.install()
        self._guard.install()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    @property
    def has_begun(self) -> bool:
        """Whether there is a recording in the folder."""
        return self._watch is not None

    @property
    def has_operators(self) -> bool:
        """Whether any operator was logged."""
        return self._watch is not None and self._log.op_count > 0

    @property
    def is_closed(self) -> bool:
        """Whether the window is over."""
        return self._watch is Watch.CLOSED

    def step(self) -> None:
        """Ends a step, in jobs that tell their steps themselves."""
        self._manual_steps = True
        try:
            if self._watch is None:
                self._begin()
            elif self._is_mine() and not self.is_closed:
                self._end_step()
        except BaseException as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)
        self._stop_job_if_asked()

    def begin(self) -> None:
        """Begins now, without waiting for a model to be called."""
        try:
            if self._watch is None:
                self._begin()
        except BaseException as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def finish(self, reason: str) -> None:
        """Ends the recording where it is, and takes every hook away."""
        try:
            if self._watch is not None and not self.is_closed:
                self._close(reason)
            if self.failure:
                self._drop_sessions()
            self._remove()
        except BaseException as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def abandon(self) -> None:
        """Takes everything away in a forked child, leaving the parent's recording alone."""
        if self._watch is not None and self._is_mine():
            self._source.abandon()
            self._times.abandon()
            self._mode.slide_out()
        self._watch = Watch.CLOSED
        self._remove()

    # -- observers' callbacks -----------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall | None:
        try:
            if self._watch is None:
                if not self._should_begin():
                    return None
                self._begin()
            if self.is_closed or not self._is_mine():
                return None
            if self._has_pending_end:
                self._end_step_if_possible()
            if self._watch not in _RECORDING:
                return None
            call = self._open_call(module, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)
            return None
        self._stop_job_if_asked()
        return call

    def _leave(self, call: OpenCall, error: BaseException | None) -> None:
        try:
            if error is not None:
                remove_own_frames(error)
            calls = self._progress.calls
            if call in calls:
                while calls and calls.pop() is not call:
                    pass  # calls that ended without passing here
                if not self.is_closed:
                    flags = FLAG_CALL_RECOMPUTE if call.is_recompute else 0
                    self._log.calls.extend(
                        (
                            call.number,
                            call.module,
                            call.parent,
                            call.first_op,
                            self._log.op_count,
                            call.enter_ns,
                            time.time_ns(),
                            flags,
                        )
                    )
        except BaseException as fault:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(fault)

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            if self._watch is None or self.is_closed or not self._is_mine():
                return
            if self._has_pending_end:
                self._end_step_if_possible()
            if self._watch in _RECORDING:
                self._progress.begin_optimizer()
                with torch._C.DisableTorchFunction():
                    self._inventory.gradients(optimizer)
        except BaseException as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            if self.is_closed:
                return
            if self._watch is not None and not self._is_mine():
                return
            if self._watch in _RECORDING:
                self._progress.end_optimizer()
            ends = self._rounds.update(optimizer)
            if self._watch is None:
                if ends:
                    self._rounds.begin_step()
                    self._step += 1
                    self._begin()  # a job without modules: it begins with its second step
            elif ends and not self._manual_steps:
                self._has_pending_end = True
                self._end_step_if_possible()
        except BaseException as error:  # noqa: BLE001 - nothing in here may reach the job
            self._fail(error)
        self._stop_job_if_asked()

    def _after_operator(self, now_ns: int, is_backward: bool) -> None:
        if now_ns - self._sampled_rss_ns > _RSS_NS:
            self._sampled_rss_ns = now_ns
            self._log.sample_rss()
        if now_ns - self._log.flushed_ns > _FLUSH_NS:
            if not is_backward and torch._C._current_graph_task_id() == -1:
                self._source.cut()
            self._log.flush()
            self._paused_ns += time.time_ns() - now_ns

    def _on_operator_error(self, error: BaseException) -> None:
        clean_uncaught()

    def _yield_profiler(self) -> None:
        """Steps aside for the job's own profiler: two sessions on one thread steal each other's events."""
        if self._watch is None or self.is_closed or not self._is_mine():
            return
        if self._times.is_running:
            self._times.stop()
            self._log.times.clear()
            self._log.record("notes", "the job's own profiler ran in the timed step: operator times are estimates")
        if self._is_epoch_open and self._source.is_running and self._source is not self._storages:
            self._pull_mode()
            self._close_epoch()
            self._log.record(
                "notes", f"the job's own profiler started in step {self._step}: recording stepped aside until its end"
            )

    # -- steps --------------------------------------------------------------------------------------------------

    def _should_begin(self) -> bool:
        if torch.is_grad_enabled():
            return True
        if not self._waits_for_training:
            # Inference before training is not worth the window; inference alone is.
            self._waits_for_training = bool(live_objects(torch.optim.Optimizer))
        return not self._waits_for_training

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        writer = SpoolWriter(self._folder)
        self._log = log = RawLog(writer)
        self._watch = Watch.SKIPPED
        log.record("start", describe_process(self._window, is_late=self._is_late))
        self._registry = ModuleRegistry(log)
        self._stacks = StackTable(log, self._calls.code)
        self._storages = StorageWatch(log)
        self._native = NativeEvents(log)
        self._source: NativeEvents | StorageWatch = self._native
        self._times = OperatorTimes(log)
        self._mode = OperatorMode(
            log,
            self._progress,
            self._stacks,
            self._registry,
            self._after_operator,
            self._fail,
            self._on_operator_error,
        )
        self._inventory = Inventory(log, self._registry, self._mode.tensor_number)
        for optimizer in live_objects(torch.optim.Optimizer):
            self._rounds.add(optimizer)
        self._registry.scan()
        self._begin_step(self._window.watch(self._step))

    def _begin_step(self, watch: Watch) -> None:
        if watch in (Watch.TIMED, Watch.PLAIN) and not self._rounds.has_optimizers and not self._manual_steps:
            watch = Watch.CLOSED  # without the dispatch mode nothing tells where such a job's steps end
        self._watch = watch
        self._progress.begin_step()
        self._rounds.begin_step()
        self._step_first_op = self._log.op_count
        self._has_pending_end = False
        if watch in _RECORDING:
            if not self._is_epoch_open:
                self._open_epoch()
            with torch._C.DisableTorchFunction():
                self._inventory.models()
        else:
            self._pull_mode()
            self._close_epoch()
            if watch is Watch.TIMED:
                if not self._times.start():
                    self._log.record(
                        "notes", "the job's own profiler ran in the timed step: operator times are estimates"
                    )
            elif watch is Watch.PLAIN:
                self._calls.remove()
                self._guard.remove()
                self._table.switch_off()
            elif watch is Watch.CLOSED:
                self._close("the window is over")
                self._stops_job = self._window.stop
                return
        self._log.flush()
        self._paused_ns = 0
        self._step_start_ns = time.time_ns()

    def _end_step_if_possible(self) -> None:
        """Ends the step unless backward is running: the engine holds the profiler's session then."""
        if self._watch is Watch.PLAIN or torch._C._current_graph_task_id() == -1:
            self._end_step()

    def _end_step(self) -> None:
        end_ns = time.time_ns()
        self._times.stop()
        if self._watch in _RECORDING:
            with torch._C.DisableTorchFunction():
                for optimizer in self._rounds.alive():
                    self._inventory.optimizer_state(optimizer)
            self._source.cut()
            self._log.sample_rss()
        # Where the job's own profiler took over, the rest of the step was not heard.
        self._write_step(end_ns, is_complete=self._is_epoch_open or self._watch not in _RECORDING)
        self._step += 1
        self._begin_step(self._window.watch(self._step))

    def _write_step(self, end_ns: int, *, is_complete: bool) -> None:
        assert self._watch is not None
        self._log.record(
            "steps",
            {
                "step": self._step,
                "kind": self._watch.value,
                "start_ns": self._step_start_ns,
                "end_ns": end_ns,
                "paused_ns": self._paused_ns,
                "first_op": self._step_first_op,
                "end_op": self._log.op_count,
                "updates": self._rounds.updates,
                "members": self._rounds.members,
                "micro_batches": max(self._progress.backward_rounds, int(self._progress.was_backward)),
                "is_complete": is_complete,
            },
        )

    def _open_epoch(self) -> None:
        """Starts to hear of memory; what is alive already is written down first."""
        self._source = self._native
        if not (self._native.is_available() and self._table.is_available and self._native.start()):
            self._source = self._storages
        self._mode.on_output = self._storages.watch if self._source is self._storages else None
        needs_watch = self._is_late or self._source is self._storages
        if needs_watch:
            self._storages.start()
        self._log.record("epochs", {"op": self._log.op_count, "time_ns": time.time_ns(), "source": self._source.name})
        with torch._C.DisableTorchFunction():
            self._inventory.held(self._storages.watch if needs_watch else None)
        self._is_epoch_open = True
        self._mode.slide_in()

    def _close_epoch(self) -> None:
        if self._is_epoch_open:
            self._is_epoch_open = False
            self._source.stop()
            self._storages.stop()

    def _open_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall:
        progress = self._progress
        is_backward = torch._C._current_graph_task_id() != -1
        is_root = not progress.calls
        if is_root and not is_backward:
            progress.leave_backward()
            if not self._rounds.has_optimizers and not self._manual_steps:
                if progress.backward_rounds:
                    self._end_step()
                elif self._log.op_count - self._step_first_op > _ONE_WINDOW_OPS:
                    self._log.record("notes", f"no optimizer and no backward in {_ONE_WINDOW_OPS:,} operators")
                    self._end_step()
                    self._close("the job has no steps: one window was recorded")
            if torch.is_grad_enabled() and not self.is_closed:
                progress.begin_model_call()
            if self._watch in _RECORDING:
                with torch._C.DisableTorchFunction():
                    self._inventory.inputs(args, kwargs)
        frame = sys._getframe(2)  # the call method around this call
        outer = progress.calls[-1] if progress.calls else None
        call = OpenCall(
            number=self._call_count,
            module=self._registry.number(module),
            parent=outer.number if outer else -1,
            first_op=self._log.op_count,
            enter_ns=time.time_ns(),
            stack=self._stacks.number(frame, outer.stack if outer else -1),
            is_recompute=is_backward,
        )
        self._call_count += 1
        progress.calls.append(call)
        return call

    # -- ends ---------------------------------------------------------------------------------------------------

    def _close(self, reason: str) -> None:
        """Ends the recording for good."""
        is_inside = self._watch in _RECORDING and self._log.op_count > self._step_first_op
        end_ns = time.time_ns()
        self._pull_mode()
        if torch._C._current_graph_task_id() == -1 and self._is_mine():
            self._times.stop()
            self._close_epoch()
        if is_inside:
            self._write_step(end_ns, is_complete=False)
        self._watch = Watch.CLOSED
        self._log.close([("end", {"reason": reason, "time_ns": end_ns})])
        self._remove()

    def _remove(self) -> None:
        self._calls.remove()
        self._guard.remove()
        self._table.switch_off()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _pull_mode(self) -> None:
        if self._mode.is_on:
            self._mode.slide_out()

    def _fail(self, error: BaseException) -> None:
        """Gives up recording after a fault of its own; the job goes on."""
        if self.failure:
            return
        self.failure = "".join(traceback.format_exception(error))
        began = self._watch is not None
        self._watch = Watch.CLOSED
        try:
            if began:
                self._mode.is_on = False
                self._drop_sessions()
                self._log.close([("faults", self.failure)])
            else:
                self._folder.parent.mkdir(parents=True, exist_ok=True)
                (self._folder.parent / f"recorder-{os.getpid()}.log").write_text(self.failure)
            self._remove()
        except Exception as second:  # noqa: BLE001 - a full disk fails twice; the job must not hear of it
            self.failure += f"\nand then: {second!r}"

    def _stop_job_if_asked(self) -> None:
        """Ends the job after its window, the way `sys.exit` does."""
        if self._stops_job and not self.failure:
            self._stops_job = False
            raise SystemExit(0)

    def _drop_sessions(self) -> None:
        """Ends profiler sessions of a recording given up; inside backward they wait for the end of the process."""
        if self._watch is not None and self._is_mine() and torch._C._current_graph_task_id() == -1:
            self._mode.slide_out()
            self._source.abandon()
            self._times.abandon()

    def _is_mine(self) -> bool:
        return threading.get_ident() == self._thread
