"""What is due after an operator: samples of the process's memory, flushes, and what the end of backward brings."""

from __future__ import annotations

import torch

from memprof.recorder.calls.call_log import CallLog
from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog
from memprof.recorder.memory.inventory import Inventory
from memprof.recorder.profiler.sources import MemorySources
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.usages import Usages

_FLUSH_NS = 1_000_000_000
_RSS_NS = 20_000_000


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
            self.paused_ns += clock_ns() - now_ns

    def _begin_backward(self) -> None:
        self._usages.begin_backward(self._rounds.alive())
        if self._calls.in_evaluation:
            self._usages.train_in_evaluation()
