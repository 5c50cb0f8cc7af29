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
        how: Source of that peak.
    """

    def __init__(self, log: RawLog) -> None:
        """Stores the recorder's log."""
        self._log = log
        self._of_places: dict[tuple[int, int], int] = {}
        self._fresh: set[tuple[int, int]] = set()
        self.step = 0
        self.high_bytes = 0
        self.reserved_bytes = -1
        self.how = COUNTED
        self._high_phase, self._high_module = OTHER, -1

    def begin_step(self, step: int) -> None:
        """Begins a step."""
        self._write_places()
        self.step = step
        self.high_bytes = 0
        self.reserved_bytes = -1
        self.how = COUNTED
        self._high_phase, self._high_module = OTHER, -1

    def see(self, count: int, phase: int, module: int) -> None:
        """Takes a count sampled while the job was at a given position."""
        if count > self.high_bytes:
            self.high_bytes, self._high_phase, self._high_module = count, phase, module
        place = (phase, module)
        if count > self._of_places.get(place, 0):
            self._of_places[place] = count
            self._fresh.add(place)

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
                self._high_phase,
                self._high_module,
                self.high_bytes,
                self.reserved_bytes,
                self.how,
                phase_now,
                module_now,
            )
        )

    def _write_places(self) -> None:
        for place in self._fresh:
            self._log.module_peaks.extend((*place, self.step, self._of_places[place]))
        self._fresh.clear()
