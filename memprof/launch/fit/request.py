"""What is asked of `memprof fit`, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memprof.launch.fit.attempt import Attempt, Measured
from memprof.launch.fit.outputs import Outputs
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import Target
from memprof.planners.search.explore import SearchRequest


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        target: The job.
        outputs: Where everything goes.
        search_request: Makes what is asked of a search, of the peak that was recorded.
        skip: Steps to let pass in each run.
        steps: Steps to record in each run.
        stop: End each run after the recorded steps.
        verify: How many plans to verify, of which the fastest is kept.
        most_attempts: Most runs under a plan.
        compiles: Run the job compiled too, and keep that where it is the fastest that fits.
        dry_window: Which steps of a dry run are looked at; None for no dry runs.
    """

    target: Target
    outputs: Outputs
    search_request: Callable[[int], SearchRequest]
    skip: int = 2
    steps: int = 3
    stop: bool = True
    verify: int = 1
    most_attempts: int = 8
    compiles: bool = False
    dry_window: DryWindow | None = None


@dataclass
class FitResult:
    """What came of it.

    Attributes:
        request: What was asked for.
        budget_bytes: Most bytes that may be allocated at once; 0 where the job failed before that was known.
        recorded: What the job needs as it is, None where it failed.
        is_from_dry_run: That is of a dry run, since the job ran out of memory.
        attempts: Its runs under plans, in order, and those that a dry run spared.
        best: The attempt whose plan was written, None where none was.
        returncode: Exit status of the job as it is, where it failed by itself; 0 otherwise.
        ended_by: Signal that ended all of it, 0 where none did.
        reason: Why no plan was written, "" where one was.
        least_bytes: Least peak that was measured, or predicted where nothing could be measured below it.
        warnings: What a reader must know to judge the figures.
    """

    request: Request
    budget_bytes: int = 0
    recorded: Measured | None = None
    is_from_dry_run: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    best: Attempt | None = None
    returncode: int = 0
    ended_by: int = 0
    reason: str = ""
    least_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def is_met(self) -> bool:
        """Whether the job was measured to fit as it is."""
        recorded = self.recorded
        return recorded is not None and not self.is_from_dry_run and recorded.peak_bytes <= self.budget_bytes

    @property
    def runs(self) -> int:
        """How often the job was really run under a plan."""
        return sum(attempt.was_run for attempt in self.attempts)
