"""Keeps the peaks of a run: of the current step, and of each phase and module so far."""

from __future__ import annotations

from memprof.recorder.log import RawLog
from memprof.trace.files.spool import OTHER

#: Source of a step's peak: positions in schema.PEAK_SOURCES.
COUNTED, HEARD_ALL, TOLD = range(3)


class Peaks:
    """Peaks, written when they exceed the value written before.

    Attributes:
        step: Number of the current step.
        high_bytes: Its peak so far.
        high_phase: Phase of that peak.
        high_module: Its module.
        how: Source of that peak.
    """

    def __init__(self, log: RawLog) -> None:
        """Stores the recorder's log."""
        self._log = log
        self._of_phases: dict[int, dict[int, int]] = {}
        self._fresh: set[tuple[int, int]] = set()
        self.step = 0
        self.high_bytes = 0
        self.reserved_bytes = -1
        self.how = COUNTED
        self.high_phase, self.high_module = OTHER, -1

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
            )
        )

    def _write_places(self) -> None:
        for phase, module in self._fresh:
            self._log.module_peaks.extend((phase, module, self.step, self._of_phases[phase][module]))
        self._fresh.clear()
