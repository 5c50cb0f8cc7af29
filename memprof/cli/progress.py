"""Progress of a search on stderr: a line that changes on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.status import Status

from memprof.analysis.plans.compare_planners import Point
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.request import SearchRequest
from memprof.units import format_count, format_us

#: Seconds until the first line where stderr is not a terminal, and between two of them.
_FIRST_S, _NEXT_S = 5.0, 10.0


class _Line:
    """A status line on stderr. Where that is not a terminal, the text is printed once in a while."""

    def __init__(self, text: str) -> None:
        self._due = time.monotonic() + _FIRST_S
        is_seen = sys.stderr is not None and sys.stderr.isatty()
        self._status: Status | None = Console(stderr=True).status(text) if is_seen else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, text: str) -> None:
        """Replaces the text."""
        if self._status is not None:
            self._status.update(text)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + _NEXT_S
            click.echo(f"memprof: {text}", err=True)


class SearchBar(_Line):
    """Counts replayed plans and names the fastest that fits."""

    def __init__(self, search_request: SearchRequest) -> None:
        super().__init__("replaying plans")
        self._search_request = search_request
        self._count = 0
        self._best: Candidate | None = None

    def add(self, one: Candidate) -> None:
        """Counts a replayed plan."""
        self._count += 1
        request = self._search_request
        fits = request.needed(one) <= request.budget_bytes
        if fits and (self._best is None or one.step_time_us < self._best.step_time_us):
            self._best = one
        # What the allocator reserves is modelled later, and for few of the plans.
        kind = "whose tensors fit" if request.counts_reserved else "that fits"
        best = f", the fastest {kind} takes {format_us(self._best.step_time_us)}" if self._best else ""
        self.show(f"{format_count(self._count, 'plan')} replayed{best} (Ctrl-C ends the search)")


class CheckLine(_Line):
    """Names the plan being dry-run."""

    def __init__(self) -> None:
        super().__init__("dry-running the job")


class PointBar(_Line):
    """Counts the searches of a comparison."""

    def __init__(self, total: int) -> None:
        super().__init__("comparing planners")
        self._total = total
        self._count = 0

    def add(self, point: Point) -> None:
        """Counts a finished search."""
        self._count += 1
        self.show(f"{self._count} of {self._total} searches: {point.planner} at {point.share:.0%}")
