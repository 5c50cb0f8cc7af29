"""Progress of a search on stderr, if it is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from memprof.analysis.plans.compare_planners import Point
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.explore import SearchRequest
from memprof.units import format_us


class _Line:
    """A status line on stderr; nothing if it is not a terminal."""

    def __init__(self, text: str) -> None:
        """Prepares the line without showing it."""
        is_seen = sys.stderr is not None and sys.stderr.isatty()
        self._status: Status | None = Console(stderr=True).status(text) if is_seen else None

    def __enter__(self) -> Self:
        """Shows the line."""
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Removes the line."""
        if self._status is not None:
            self._status.stop()

    def show(self, text: str) -> None:
        """Replaces the text."""
        if self._status is not None:
            self._status.update(text)


class SearchBar(_Line):
    """Counts replayed plans and names the fastest that fits."""

    def __init__(self, search_request: SearchRequest) -> None:
        """Prepares the line without showing it."""
        super().__init__("replaying plans")
        self._search_request = search_request
        self._count = 0
        self._best: Candidate | None = None

    def add(self, one: Candidate) -> None:
        """Counts a replayed plan."""
        self._count += 1
        fits = one.peak_bytes <= self._search_request.budget_bytes
        if fits and (self._best is None or one.step_time_us < self._best.step_time_us):
            self._best = one
        best = f", the fastest that fits takes {format_us(self._best.step_time_us)}" if self._best else ""
        self.show(f"{self._count} plans replayed{best} (Ctrl-C ends the search)")


class CheckLine(_Line):
    """Names the plan being dry-run."""

    def __init__(self) -> None:
        """Prepares the line with its first text."""
        super().__init__("dry-running the job")


class PointBar(_Line):
    """Counts the searches of a comparison."""

    def __init__(self, total: int) -> None:
        """Prepares the line without showing it."""
        super().__init__("comparing planners")
        self._total = total
        self._count = 0

    def add(self, point: Point) -> None:
        """Counts a finished search."""
        self._count += 1
        self.show(f"{self._count} of {self._total} searches: {point.planner} at {point.share:.0%}")
