"""What others want every recording of this process to say: sentences for its reader, and the plan it runs under.

They are told before a recording begins as well as later, and each recording of the process writes them all.
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
        record: What it says, as JSON holds it.
        about: What it is about; with that gone, nobody says it any more.
    """

    stream: str
    record: Any
    about: weakref.ref[Any]


#: In the order told.
_remarks: list[Remark] = []


def add_remark(stream: str, record: Any, about: Any) -> Remark:
    """Adds a remark.

    Args:
        stream: ``notes`` for a sentence, ``plan`` for the plan in force, as a dict that JSON holds.
        record: The remark.
        about: The model it is about: recordings say it as long as that lives.
    """
    remark = Remark(stream, record, weakref.ref(about))
    _remarks.append(remark)
    return remark


def remove_remark(remark: Remark) -> None:
    """Takes a remark back: recordings that begin later do not say it."""
    if remark in _remarks:
        _remarks.remove(remark)


class RemarkReader:
    """Hands out each remark once; every recording has its own."""

    def __init__(self) -> None:
        """Begins with the first remark there is."""
        self._told: list[Remark] = []
        self._sentences: list[Any] = []

    def fresh(self) -> list[tuple[str, Any]]:
        """Returns stream and record of the remarks not handed out yet."""
        fresh = [remark for remark in _remarks if remark not in self._told and remark.about() is not None]
        self._told += fresh
        said = []
        for remark in fresh:
            # A sentence about a model and about each of its copies is one sentence.
            if remark.stream != "notes" or remark.record not in self._sentences:
                said.append((remark.stream, remark.record))
            if remark.stream == "notes":
                self._sentences.append(remark.record)
        return said
