"""Sentences for the reader of a recording about what it lacks, each written once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from memprof.recorder.log import TOO_MANY_NAMES, RawLog
from memprof.recorder.profiler.sessions import why_no_session
from memprof.recorder.steps.batches import BatchObserver


class Noting(Protocol):
    """A part of the recorder that has notes."""

    def notes(self) -> list[str]:
        """Returns its notes on the recording."""


class Notes:
    """Writes the notes of one recording."""

    def __init__(self, log: RawLog, batches: BatchObserver, parts: Iterable[Noting]) -> None:
        """Starts without any.

        Args:
            log: Destination of the notes.
            batches: Inspects the batches that DataLoaders yield.
            parts: Further parts of the recorder that have notes.
        """
        self._log = log
        self._batches = batches
        self._parts = parts
        self._noted: set[str] = set()

    def add(self, sentence: str) -> None:
        """Writes a note, once."""
        if sentence not in self._noted:
            self._noted.add(sentence)
            self._log.record("notes", sentence)

    def untimed(self) -> None:
        """Notes that the timed step was not timed."""
        self.add(f"{why_no_session()} in the timed step: operator times are estimates")

    def finish(self, not_followed: Iterable[str]) -> None:
        """Writes what the whole window has shown.

        Args:
            not_followed: Higher-order operators of which the operators inside were not recorded.
        """
        if self._batches.undivided:
            self._log.record("batches", self._batches.undivided)
        for part in self._parts:
            for sentence in part.notes():
                self.add(sentence)
        for name in sorted(not_followed):
            self.add(f"{name}: this higher-order operator is recorded as one operator, without the operators inside")
        if self._log.names_left_out:
            self.add(TOO_MANY_NAMES)
