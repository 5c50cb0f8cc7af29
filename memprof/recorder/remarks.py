"""Remarks for every recording of this process: notes for the reader, and the plan in force.

A remark may be added before or after a recording begins; each recording of the process writes all of them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Remark:
    """One remark.

    Attributes:
        stream: Stream of records it goes to.
        record: Its content, as JSON.
        about: Object it refers to; once that is freed, the remark is no longer written.
    """

    stream: str
    record: Any
    about: weakref.ref[Any]


#: In the order added.
_remarks: list[Remark] = []


def add_remark(stream: str, record: Any, about: Any) -> Remark:
    """Adds a remark.

    Args:
        stream: ``notes`` for a sentence, ``plan`` for the plan in force, as a JSON-serializable dict.
        record: The remark.
        about: The model it refers to: recordings include the remark while the model is alive.
    """
    remark = Remark(stream, record, weakref.ref(about))
    _remarks.append(remark)
    return remark


def remove_remark(remark: Remark) -> None:
    """Removes a remark: later recordings do not include it."""
    if remark in _remarks:
        _remarks.remove(remark)


class RemarkReader:
    """Returns each remark once; every recording has its own reader."""

    def __init__(self) -> None:
        """Starts at the first remark."""
        self._written: list[Remark] = []
        self._sentences: list[Any] = []

    def fresh(self) -> list[tuple[str, Any]]:
        """Returns stream and record of the remarks not returned before."""
        fresh = [remark for remark in _remarks if remark not in self._written and remark.about() is not None]
        self._written += fresh
        said = []
        for remark in fresh:
            # The same note about a model and its copies is written once.
            if remark.stream != "notes" or remark.record not in self._sentences:
                said.append((remark.stream, remark.record))
            if remark.stream == "notes":
                self._sentences.append(remark.record)
        return said
