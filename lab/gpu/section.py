"""One section in its own process: `python -m lab.gpu.section NAME DEVICE OUT SECONDS`."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.gpu.results import Bar, Section

_TIMED = ("policies", "overhead", "swap")
#: Where each section is measured: a module with TITLE, HOW, COLUMNS and ``measure(place, found)``.
MODULES = {
    "exact": "exact",
    "replay": "replayed",
    "policies": "policies",
    "suggest": "suggested",
    "overhead": "overhead",
    "swap": "swapped",
    "samples": "samples",
    "pytest": "marked",
    "dry": "dried",
}


@dataclass(frozen=True)
class Place:
    """Where and for how long a section measures.

    Attributes:
        device: ``cuda``, or ``cpu`` in a rehearsal.
        out: Folder of the results.
        end: When it has to be done, on the monotonic clock.
        is_timed: Whether it measures times, which jobs that start on the same processor lengthen.
    """

    device: str
    out: Path
    end: float
    is_timed: bool = False

    @property
    def is_rehearsal(self) -> bool:
        """Whether nothing of what is found is a measurement."""
        return self.device != "cuda"

    @property
    def device_name(self) -> str:
        """The device as traces have it."""
        return "cuda:0" if self.device == "cuda" else "cpu"

    @property
    def lanes(self) -> int:
        """Jobs at a time: they start side by side, and compute one after the other."""
        cores = os.cpu_count() or 1
        return 2 if self.is_rehearsal else max(2, min(cores // 4, 4) if self.is_timed else min(cores // 2, 8))

    @property
    def is_over(self) -> bool:
        """Whether no time is left to begin anything."""
        return time.monotonic() > self.end

    def folder(self, name: str) -> Path:
        """Returns a folder below the results', made where it is not there."""
        path = self.out / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def judged(self, passed: bool) -> bool | None:
        """Returns a verdict on times, which a rehearsal does not give."""
        return None if self.is_rehearsal else passed


class Found:
    """What a section has found so far; on disk after every row."""

    def __init__(self, section: Section, path: Path) -> None:
        """Has found nothing."""
        self.section = section
        self._path = path

    def add(self, cells: Iterable[str], **figures: Any) -> None:
        """Adds a row and its numbers."""
        self.section.rows.append(list(cells))
        self.section.figures.append(figures)
        self.save()

    def lost(self, what: str, error: BaseException) -> None:
        """Notes that a row went wrong."""
        self.section.errors.append(f"{what}: {error}")
        self.save()

    def note(self, text: str) -> None:
        """Adds a note for the reader."""
        self.section.notes.append(text)
        self.save()

    def bar(self, text: str, passed: bool | None) -> None:
        """Adds what must hold."""
        self.section.bars.append(Bar(text, passed))
        self.save()

    def save(self) -> None:
        """Writes everything."""
        self.section.save(self._path)


def main() -> None:
    """Measures one section."""
    name, device, out, seconds = sys.argv[1:]
    place = Place(device, Path(out), time.monotonic() + float(seconds), is_timed=name in _TIMED)
    module = importlib.import_module(f"lab.gpu.{MODULES[name]}")
    section = Section(name, title=module.TITLE, how=module.HOW, columns=list(module.COLUMNS))
    found = Found(section, place.folder("work") / f"{name}.json")
    found.save()
    if place.is_rehearsal:
        found.note("A rehearsal on a processor, at tiny sizes: these are no measurements.")
    module.measure(place, found)


if __name__ == "__main__":
    main()
