"""Rows are buffered until they are written, whichever thread adds them."""

from __future__ import annotations

import threading
from array import array
from pathlib import Path

from memprof.recorder.log import RawLog
from memprof.trace.files.spool import COLUMNS
from memprof.trace.files.spool_writer import SpoolWriter

_WIDTH = len(COLUMNS["events"])


class _SlowWriter(SpoolWriter):
    """Another thread frees a tensor while the first rows are written: Python lets it run meanwhile."""

    log: RawLog

    def write_rows(self, stream: str, rows: array[int]) -> None:
        """Writes, while a row is added."""
        if rows[0] == 1:
            freeing = threading.Thread(target=self.log.events.extend, args=((2,) * _WIDTH,))
            freeing.start()
            freeing.join()
        super().write_rows(stream, rows)


def test_a_row_added_while_others_are_written_is_kept(tmp_path: Path) -> None:
    """It is written next."""
    writer = _SlowWriter(tmp_path / "spool")
    log = writer.log = RawLog(writer)
    log.events.extend((1,) * _WIDTH)
    log.flush()
    assert log.events == [2] * _WIDTH
    log.close()
    assert not log.events
