"""The request, the measured runs and the result of `memprof fit`, and its files."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from memprof.launch.outcome.output import refuse_taken, spool_of
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import CannotStartError, Target
from memprof.planners.search.request import MakeSearchRequest
from memprof.policies.plan.plan import Plan
from memprof.trace.store import Trace
from memprof.trace.whole_steps import has_untouched_step, require_whole_step

_PLAN = ".toml"


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


@dataclass(frozen=True)
class Outputs:
    """The output paths.

    Attributes:
        plan: The plan, written once a run under it was measured to fit.
        run: The recording of the unmodified job.
        head: The recording under the plan.
        folder: The folder created for them; None if they are in an existing one.
    """

    plan: Path
    run: Path
    head: Path
    folder: Path | None = None

    @property
    def attempt(self) -> Path:
        """The recording under the plan being tried."""
        return self.head.with_name(f"{self.head.stem}.attempt.memprof")

    def keep_attempt(self) -> None:
        """Renames the recording of the last attempt to the one under the plan."""
        self.attempt.replace(self.head)

    def remove_if_empty(self) -> None:
        """Removes the created folder if it is empty."""
        if self.folder is not None and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def claim_outputs(output: Path | None, stem: str, *, force: bool) -> Outputs:
    """Chooses the output paths, and creates the folder.

    Args:
        output: A folder, or a plan file (``.toml``), with the recordings written next to it; None for the folder
            ``<stem>.<time>.fit``.
        stem: Name of the job.
        force: Overwrite the files of an earlier fit.

    Raises:
        CannotStartError: An output exists already, or the location is not writable.
    """
    if output is None:
        output = _free_name(f"{stem}.{time.strftime('%Y%m%d-%H%M%S')}")
    if output.suffix == _PLAN:
        outputs = Outputs(output, output.with_suffix(".run.memprof"), output.with_suffix(".head.memprof"))
    else:
        outputs = Outputs(output / "plan.toml", output / "run.memprof", output / "head.memprof", output)
    for path in (outputs.plan, outputs.run, outputs.head):
        refuse_taken(path, force=force)
    try:
        if outputs.folder is not None:
            outputs.folder.mkdir(exist_ok=True)
        # If kept, they would be mistaken for this run's.
        outputs.plan.unlink(missing_ok=True)
        for path in (outputs.run, outputs.head, outputs.attempt):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CannotStartError(f"{output} cannot be written: {error.strerror}. Choose another name with -o.") from None
    return outputs


def discard(recording: Path) -> None:
    """Deletes a recording, packed or not."""
    recording.unlink(missing_ok=True)
    shutil.rmtree(spool_of(recording), ignore_errors=True)


def _free_name(stem: str) -> Path:
    count = 1
    while (path := Path(f"{stem}{f'-{count}' if count > 1 else ''}.fit")).exists():
        count += 1
    return path


@dataclass(frozen=True)
class Measured:
    """The measurements of a recorded run.

    Attributes:
        peak_bytes: Peak live bytes over all ranks and recorded steps.
        step_time_us: Step time in microseconds on that rank; NaN if no step ran without the recorder.
        rank: The rank with that peak.
    """

    peak_bytes: int
    step_time_us: float
    rank: int


@dataclass(frozen=True)
class Attempt:
    """A run of the job under a plan, or a dry run that made it unnecessary.

    Attributes:
        plan: The plan, with its prediction.
        outcome: ``fits`` the budget; ``above`` it; ``refused``: the plan does not fit the job; ``failed`` under it;
            ``passed over``: its dry run was above the budget.
        measured: The measurements; None if nothing was recorded.
        reason: Why the plan or the job failed, "" if neither did.
        dry_bytes: Peak of its dry run; None if there was none.
        dry_reserved_bytes: What was reserved in it, where the budget is a device's; 0 elsewhere.
        ran_out: Whether the job failed because it ran out of memory.
    """

    plan: Plan
    outcome: str
    measured: Measured | None
    reason: str = ""
    dry_bytes: int | None = None
    dry_reserved_bytes: int = 0
    ran_out: bool = False

    @property
    def difference_bytes(self) -> int | None:
        """The dry run's peak minus the predicted one; None without both."""
        prediction = self.plan.prediction
        return (
            None if self.dry_bytes is None or prediction is None else self.dry_bytes - prediction.peak_allocated_bytes
        )

    @property
    def was_run(self) -> bool:
        """Whether the job ran for real."""
        return self.outcome != "passed over"


def measure(trace: Trace) -> Measured:
    """Returns a job's measurements from its recording.

    Raises:
        BadInputError: The recording contains no operators.
        InconclusiveError: The recording contains no complete step, so the peak may be still to come.
    """
    ranks = [trace.rank_trace(rank) for rank in trace.ranks]
    peaks = [max(rank.step_peaks().values(), default=0) for rank in ranks]
    fullest = ranks[peaks.index(max(peaks))]
    require_whole_step(fullest)
    step = fullest.fullest_step()
    time_us = step.duration_us if has_untouched_step(fullest) else math.nan
    return Measured(peak_bytes=max(peaks), step_time_us=time_us, rank=fullest.rank)
