"""The request and the result of `memprof fit`."""

from __future__ import annotations

from dataclasses import dataclass, field

from memprof.launch.fit.attempt import Attempt, Measured
from memprof.launch.fit.outputs import Outputs
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import Target
from memprof.planners.search.request_maker import MakeSearchRequest


@dataclass(frozen=True)
class Request:
    """The request of a fit.

    Attributes:
        target: The job.
        outputs: The output paths.
        search_request: Makes the search request for the recording.
        skip: Steps to skip in each run.
        steps: Steps to record in each run.
        stop: End each run after the recorded steps.
        verify: How many plans to verify, of which the fastest is kept.
        most_attempts: Maximum runs under a plan.
        compiles: Also run the job compiled, and keep that if it is the fastest that fits.
        dry_window: Steps of a dry run to record; None for no dry runs.
    """

    target: Target
    outputs: Outputs
    search_request: MakeSearchRequest
    skip: int = 2
    steps: int = 3
    stop: bool = True
    verify: int = 1
    most_attempts: int = 8
    compiles: bool = False
    dry_window: DryWindow | None = None


@dataclass
class FitResult:
    """The result of a fit.

    Attributes:
        request: The request.
        budget_bytes: Maximum live bytes; 0 if the job failed before it was known.
        recorded: Measurements of the unmodified job; None if it failed.
        is_from_dry_run: `recorded` is from a dry run, because the job ran out of memory.
        dry_reserved_bytes: What the allocator of a simulated device reserved in that dry run; 0 elsewhere.
        attempts: The runs under plans, in order, and those replaced by a dry run.
        best: The attempt whose plan was written; None if none was.
        returncode: Exit status of the unmodified job if it failed by itself; 0 otherwise.
        ended_by: The signal that ended the fit; 0 if none did.
        reason: Why no plan was written, "" if one was.
        least_bytes: Lowest peak measured, or predicted if no lower one could be measured.
        warnings: Caveats on the figures.
    """

    request: Request
    budget_bytes: int = 0
    recorded: Measured | None = None
    is_from_dry_run: bool = False
    dry_reserved_bytes: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    best: Attempt | None = None
    returncode: int = 0
    ended_by: int = 0
    reason: str = ""
    least_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def is_met(self) -> bool:
        """Whether the unmodified job was measured to fit."""
        recorded = self.recorded
        return recorded is not None and not self.is_from_dry_run and recorded.peak_bytes <= self.budget_bytes

    @property
    def runs(self) -> int:
        """Number of real runs under a plan."""
        return sum(attempt.was_run for attempt in self.attempts)
