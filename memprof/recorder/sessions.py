"""What observes a thread's operators and memory, opened and closed together, and housekeeping after each operator."""

from __future__ import annotations

import torch

from memprof.recorder.calls.call_log import CallLog
from memprof.recorder.calls.torch_state import untraced
from memprof.recorder.clock import clock_ns
from memprof.recorder.compiled.generated_modules import GeneratedModules
from memprof.recorder.log import RawLog
from memprof.recorder.memory.inventory import Inventory
from memprof.recorder.operators import OperatorMode
from memprof.recorder.profiler.sources import MemorySources
from memprof.recorder.profiler.timing import OperatorTimes
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.usages import Usages

_FLUSH_NS = 1_000_000_000
_RSS_NS = 20_000_000


class Sessions:
    """The dispatch mode with the sources of memory events, and the timer of steps without them.

    Attributes:
        mode: Logs operators.
        sources: Log memory events.
        times: Logs operator times.
        is_late: Tensors were allocated while the allocator's table was off.
    """

    def __init__(
        self,
        mode: OperatorMode,
        sources: MemorySources,
        times: OperatorTimes,
        inventory: Inventory,
        generated: GeneratedModules | None,
        *,
        is_late: bool,
    ) -> None:
        """Stores the observers, all off.

        Args:
            mode: Logs operators.
            sources: Log memory events.
            times: Logs operator times.
            inventory: States what is held when events begin.
            generated: The code that torch.compile has generated; None in a dry run, which follows it in its own way.
            is_late: Tensors were allocated before the allocator's table was enabled.
        """
        self.mode = mode
        self.sources = sources
        self.times = times
        self.is_late = is_late
        # Threads of gloo hold a collective's tensors for a while, and native events lack what such a thread frees; the
        # allocator's count shows it, unless tensors of before are missing from that count.
        self._is_uncounted = is_late
        self._inventory = inventory
        self._generated = generated

    def open(self) -> None:
        """Starts logging operators and memory events, if they are off; existing allocations are written first."""
        if self.sources.is_open:
            return
        self.sources.start()
        self.mode.begin_epoch(self.sources.on_output, self.sources.follow_on_cpu if self._is_uncounted else None)
        with torch._C.DisableTorchFunction(), untraced():
            self._inventory.held(self.sources.follow if self.is_late else self.sources.remember)
        self.is_late = False  # from now on every allocation is in the allocator's table, which reports its free
        self.mode.slide_in()
        if self._generated is not None:
            self._generated.switch_on()

    def close(self) -> None:
        """Stops logging operators and memory events."""
        self.close_operators()
        self.sources.stop()

    def close_operators(self) -> None:
        """Stops logging operators; also possible inside backward."""
        self._leave_generated()
        if self.mode.is_on:
            self.mode.slide_out()

    def abandon(self) -> None:
        """Stops everything without logging: after a fault, or in a forked child."""
        self._leave_generated()
        self.mode.slide_out()
        self.sources.abandon()
        self.times.abandon()

    def make_way(self) -> bool:
        """Stops logging operators and memory events for the job's own profiler; returns whether they were on."""
        if self.sources.is_open:
            self.close()
            return True
        if self.mode.is_here():  # removed inside backward, and put back by the engine when backward ended
            self.mode.slide_out()
        return False

    def _leave_generated(self) -> None:
        if self._generated is not None:
            self._generated.switch_off()


class AfterOperator:
    """Follows the operators of a recording.

    Attributes:
        paused_ns: Time spent writing in the current step.
    """

    def __init__(
        self,
        log: RawLog,
        sources: MemorySources,
        inventory: Inventory,
        rounds: OptimizerRounds,
        usages: Usages,
        calls: CallLog,
    ) -> None:
        """Stores the recorder's shared components.

        Args:
            log: Is flushed every second.
            sources: The events of memory, which are logged before a flush.
            inventory: States the gradients that backward has made.
            rounds: The job's optimizers.
            usages: Is notified that backward begins.
            calls: The module calls.
        """
        self.paused_ns = 0
        self._log = log
        self._sources = sources
        self._inventory = inventory
        self._rounds = rounds
        self._usages = usages
        self._calls = calls
        self._sampled_rss_ns = 0
        self._has_new_gradients = False
        self._has_pending_cut = False

    def cut_outside_backward(self) -> None:
        """Logs the events so far: now, or after backward, inside which that is not possible."""
        if torch._C._current_graph_task_id() == -1:
            self._sources.cut()
        else:
            self._has_pending_cut = True

    def follow(self, now_ns: int, is_backward: bool) -> None:
        """Does what is due.

        Args:
            now_ns: When the operator ended.
            is_backward: A backward node ran it.
        """
        if now_ns - self._sampled_rss_ns > _RSS_NS:
            self._sampled_rss_ns = now_ns
            self._log.sample_rss()
        if is_backward:
            if not self._has_new_gradients:
                self._usages.begin_backward(self._rounds.alive())
                if self._calls.in_evaluation:
                    self._usages.train_in_evaluation()
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
            self.paused_ns += clock_ns() - now_ns
