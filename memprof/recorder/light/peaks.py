"""Keeps the highest counts of a run: of the step under way, and of each phase and module so far."""

from __future__ import annotations

from memprof.recorder.log import RawLog
from memprof.trace.files.spool import OTHER

#: Where a step's highest count is from: positions in schema.PEAK_SOURCES.
COUNTED, HEARD_ALL, TOLD = range(3)


class Peaks:
    """Highest counts, written when they are higher than what was written before.

    Attributes:
        step: Number of the step under way.
        high_bytes: Its highest count so far.
        how: Where that is from.
    """

    def __init__(self, log: RawLog) -> None:
        """Shares the recorder's log."""
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
        """Takes a count that was seen while the job was at a place."""
        if count > self.high_bytes:
            self.high_bytes, self._high_phase, self._high_module = count, phase, module
        if count > self._of_places.get((phase, module), 0):
            self._of_places[phase, module] = count
            self._fresh.add((phase, module))

    def write(
        self, start_ns: int, end_ns: int, *, updates: int, is_complete: bool, phase_now: int, module_now: int
    ) -> None:
        """Logs the step as it is by now; a later row of the same step takes this one's place."""
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
