"""The raw log of a light recording: one file for data on the whole run, and a ring of files for the rest."""

from __future__ import annotations

import shutil
import sys
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memprof.recorder.clock import clock_ns
from memprof.recorder.faults import raise_if_of_job
from memprof.recorder.log import RawLog
from memprof.trace.files.spool import LIGHT_FOLDER, RING_PREFIX, RING_STREAMS
from memprof.trace.files.spool_writer import SpoolWriter

#: Files of the ring that are kept: the current one and the one before.
_KEPT = 2


class LightLog(RawLog):
    """Writes the ring's streams to a file of their own, which `turn` rotates; all others go to the main file.

    Texts are in the main file, so that numbers mean the same in every file of the ring.

    Attributes:
        main_folder: Folder of the main file.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the main file.

        Args:
            folder: Spool folder of this process.

        Raises:
            OSError: It cannot be written.
        """
        self.main_folder = folder / LIGHT_FOLDER
        super().__init__(SpoolWriter(self.main_folder))
        self._folder = folder
        self._turns = 0
        self._ring: SpoolWriter | None = None

    def turn(self) -> None:
        """Starts the next file of the ring, and removes the oldest.

        Raises:
            OSError: It cannot be written.
        """
        self.flush()
        if self._ring is not None:
            self._ring.close()
        if self._turns >= _KEPT:
            oldest = self._folder / f"{RING_PREFIX}{self._turns - _KEPT}"
            if sys.version_info >= (3, 12):  # which deprecates the other name
                shutil.rmtree(oldest, onexc=_leave_it)
            else:
                shutil.rmtree(oldest, onerror=_leave_it)
        self._ring = SpoolWriter(self._folder / f"{RING_PREFIX}{self._turns}")
        self._turns += 1

    def record_in_ring(self, stream: str, record: Any) -> None:
        """Writes one record at once to the ring's file, after everything logged before it.

        Raises:
            OSError: The spool cannot be written.
        """
        self.flush()
        if self._ring is not None:
            self._ring.write_record(stream, record)

    def flush(self) -> None:
        """Writes all buffered rows to the operating system.

        Raises:
            OSError: The spool cannot be written.
        """
        rows = {stream: getattr(self, stream) for stream in RING_STREAMS}
        taken = {stream: array("q", values) for stream, values in rows.items() if values}
        for values in rows.values():
            values.clear()
        super().flush()  # texts first: no number without its text
        if self._ring is not None:
            for stream, values in taken.items():
                self._ring.write_rows(stream, values)
        self.flushed_ns = clock_ns()

    def close(self, records: Iterable[tuple[str, Any]] = ()) -> None:
        """Flushes, writes the final records and closes both files."""
        super().close(records)
        if self._ring is not None:
            self._ring.close()


def _leave_it(_function: Any, _path: Any, error: Any) -> None:
    """Leaves a file that cannot be removed."""
    raise_if_of_job(error[1] if isinstance(error, tuple) else error)
