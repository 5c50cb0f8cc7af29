"""Where a followed thread is, and the peaks of the run there: of the step, and of each phase and module.

A model makes most of its module calls inside another, in forward, while no events are recorded. For these, the
allocator's count is compared and the position changed, and nothing else: no clock is read, no object made.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch

from memprof.recorder.light.allocators import AllocatorCount
from memprof.recorder.log import RawLog
from memprof.recorder.memory.live_objects import OutsideWatch
from memprof.trace.files.spool import FORWARD, OTHER

#: Number of a call on the short path, of which no row is written.
UNCOUNTED = -1
#: Calls at whose end no clock is read: at most so many in a row, and none where calls took longer than that.
_MOST_UNTIMED, _SLOW_NS = 16, 50_000_000
_get_ident = threading.get_ident
_graph_task = torch._C._current_graph_task_id
_is_grad_enabled = torch.is_grad_enabled
#: Source of a step's peak: positions in schema.PEAK_SOURCES.
COUNTED, HEARD_ALL, TOLD = range(3)


class LightCall(NamedTuple):
    """An open module call: its number, module and phase, its start time, and the enclosing call."""

    number: int
    module: int
    phase: int
    enter_ns: int
    parent: int


class Position:
    """The open module calls of one thread, the one that created it, and where it is.

    Attributes:
        calls: The open calls, outermost first.
        base: The phase, without the job's own name for it.
        phase: The phase, a job's own name included.
        module: Number of the module, -1 outside any.
        is_evaluating: A trained model is called with gradients off.
        closed: How many calls have ended.
        is_quiet: The short path may be used.
    """

    def __init__(self, count: AllocatorCount, outside: OutsideWatch, peaks: Peaks) -> None:
        """Starts outside of any call.

        Args:
            count: The CPU allocator's count.
            outside: Follows what counts in addition.
            peaks: Keeps the highest counts.
        """
        self.calls: list[LightCall] = []
        self.base = self.phase = OTHER
        self.module = -1
        self.is_evaluating = False
        self.closed = 0
        self.is_quiet = False
        self._thread = _get_ident()
        self._count, self._outside = count, outside
        self._peaks = peaks
        self._highs = peaks.of_phase(FORWARD)
        self._known: dict[int, tuple[weakref.ref[torch.nn.Module], LightCall]] = {}
        self._untimed = self._untimed_left = 0
        self._clock_ns = 0

    def learn(self, module: torch.nn.Module, number: int) -> None:
        """Has later calls of a module take the short path."""
        self._known[id(module)] = (weakref.ref(module), LightCall(UNCOUNTED, number, FORWARD, 0, -1))

    def note_clock(self, now_ns: int) -> None:
        """Notes that the clock was read at the end of a call that did not take the short path."""
        self.closed += 1 + self._untimed - self._untimed_left
        is_slow = now_ns - self._clock_ns > _SLOW_NS
        self._untimed = self._untimed_left = 0 if is_slow else min(2 * self._untimed + 1, _MOST_UNTIMED)
        self._clock_ns = now_ns

    def open_nested(self, module: torch.nn.Module) -> LightCall | None:
        """Opens a nested call in forward; returns None, having done nothing, for any other."""
        known = self._known.get(id(module))
        if (
            known is None
            or self.phase != FORWARD
            or not self.calls
            or not _is_grad_enabled()
            or _graph_task() != -1
            or known[0]() is not module
            or _get_ident() != self._thread
        ):
            return None
        self._see()
        call = known[1]
        self.calls.append(call)
        self.module = call[1]
        return call

    def close_nested(self, call: LightCall) -> bool:
        """Closes a nested call that returns; returns False, having done nothing, for any other."""
        calls = self.calls
        if (
            not self._untimed_left
            or self.phase != FORWARD
            or len(calls) < 2
            or calls[-1] is not call
            or calls[-2][2] != FORWARD
        ):
            return False
        self._untimed_left -= 1
        self._see()
        del calls[-1]
        self.module = calls[-1][1]
        return True

    def _see(self) -> None:
        """Compares the count for the position in forward that the thread leaves."""
        count: int = self._count.word.value  # type: ignore[union-attr]
        high = self._count.high
        if high.value > count:
            count = high.value
        high.value = 0
        count += self._outside.alive_bytes
        module, peaks = self.module, self._peaks
        if count > peaks.high_bytes:
            peaks.high_bytes, peaks.high_phase, peaks.high_module = count, FORWARD, module
        if count > self._highs.get(module, 0):
            peaks.see(count, FORWARD, module)


class Peaks:
    """Peaks, written when they exceed the value written before.

    Attributes:
        step: Number of the current step.
        high_bytes: Its peak so far.
        high_phase: Phase of that peak.
        high_module: Its module.
        how: Source of that peak.
        end_bytes: The count at the end of the step; -1 where there is none.
        elements: Elements of the inputs of its models in training.
    """

    def __init__(self, log: RawLog) -> None:
        self._log = log
        self._of_phases: dict[int, dict[int, int]] = {}
        self._fresh: set[tuple[int, int]] = set()
        self.step = 0
        self.high_bytes = 0
        self.reserved_bytes = -1
        self.how = COUNTED
        self.high_phase, self.high_module = OTHER, -1
        self.end_bytes, self.elements = -1, 0

    def of_phase(self, phase: int) -> dict[int, int]:
        """Returns the highest counts in a phase so far, by number of the module."""
        return self._of_phases.setdefault(phase, {})

    def begin_step(self, step: int) -> None:
        """Begins a step."""
        self._write_places()
        self.step = step
        self.high_bytes = 0
        self.reserved_bytes = -1
        self.how = COUNTED
        self.high_phase, self.high_module = OTHER, -1
        self.elements = 0

    def see(self, count: int, phase: int, module: int) -> None:
        """Takes a count sampled while the job was at a given position."""
        if count > self.high_bytes:
            self.high_bytes, self.high_phase, self.high_module = count, phase, module
        highs = self._of_phases.get(phase)
        if highs is None:
            highs = self.of_phase(phase)
        if count > highs.get(module, 0):
            highs[module] = count
            self._fresh.add((phase, module))

    def write(
        self, start_ns: int, end_ns: int, *, updates: int, is_complete: bool, phase_now: int, module_now: int
    ) -> None:
        """Logs the current step so far; a later row of the same step replaces this one."""
        self._write_places()
        self._log.step_peaks.extend(
            (
                self.step,
                start_ns,
                end_ns,
                is_complete,
                updates,
                self.high_phase,
                self.high_module,
                self.high_bytes,
                self.reserved_bytes,
                self.how,
                phase_now,
                module_now,
                self.end_bytes if is_complete else -1,
                self.elements,
            )
        )

    def _write_places(self) -> None:
        for phase, module in self._fresh:
            self._log.module_peaks.extend((phase, module, self.step, self._of_phases[phase][module]))
        self._fresh.clear()
