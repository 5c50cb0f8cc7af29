"""The outcome of a dry run of a job under a plan: the plan's peak as applied, before a real run is spent on it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from memprof.analysis.allocator.device_verdict import dry_fit
from memprof.analysis.plans.dry_check_results import Checked, describe_difference
from memprof.errors import BadInputError, InconclusiveError
from memprof.launch.fit.request import measure
from memprof.launch.outcome.verdict import describe_status
from memprof.launch.parent.recorded_job import Recorded, run_recorded
from memprof.launch.parent.relay import ENDING
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import CannotStartError, Target
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.request import SearchRequest
from memprof.policies.plan.plan import Plan
from memprof.trace.store import Trace
from memprof.units import format_bytes

#: Maximum characters of an error's last line in messages.
_MOST_SAID = 300
#: If the unmodified job's dry run differs by more than this fraction from the recording, its dry runs are not used.
_MOST_ERROR = 0.01


class EndedError(Exception):
    """A signal that asks the whole command to end reached this process while a job ran."""

    def __init__(self, number: int) -> None:
        """Stores the signal number."""
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class DryOutcome:
    """The result of a dry run.

    Attributes:
        peak_bytes: Peak live bytes over all steps; None if no step was dry-run.
        reason: Why no step was dry-run, a sentence; "" if one was.
        was_started: Whether the job was started.
        reserved_bytes: Peak of what the allocator of a simulated device reserved; 0 elsewhere.
        is_refused: Whether the job refused the plan, or failed: a real run would, too.
    """

    peak_bytes: int | None
    reason: str = ""
    was_started: bool = True
    reserved_bytes: int = 0
    is_refused: bool = False

    def describe_distrust(self, recorded_bytes: int) -> str:
        """Returns why dry runs of a job are not trusted, given that of the job as it is; "" if it peaks as recorded."""
        if self.peak_bytes is None:
            return f"the job cannot be dry-run: {self.reason}"
        if abs(self.peak_bytes - recorded_bytes) <= _MOST_ERROR * recorded_bytes:
            return ""
        off = describe_difference(self.peak_bytes, recorded_bytes)
        return f"a dry run of the unmodified job peaks at {format_bytes(self.peak_bytes)} ({off})"

    def checked(self, plan: Plan, one: Candidate, request: SearchRequest) -> Checked:
        """Compares the run with the budget: what was reserved counts where that is a device's."""
        return Checked(
            plan,
            one.peak_bytes,
            request.budget_bytes,
            self.peak_bytes,
            self.reason,
            one.interval.most_bytes,
            self.reserved_bytes if request.counts_reserved else 0,
        )


def outcome_of(done: Recorded, errors: str) -> DryOutcome:
    """Returns the outcome of a dry run that has ended.

    Args:
        done: How it ended.
        errors: What the job wrote to its standard error.
    """
    if done.refusal:
        return DryOutcome(None, done.refusal, is_refused=True)
    if done.returncode:
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
        failed = f"the job failed in a dry run, {describe_status(done.returncode)}: {last[:_MOST_SAID]}"
        return DryOutcome(None, failed, is_refused=True)
    if done.missed:
        return DryOutcome(None, " ".join(done.missed))
    if not done.output.is_file():
        return DryOutcome(None, done.verdict.sentence)
    try:
        trace = Trace.open(done.output)
        measured = measure(trace)
        on_device = dry_fit(trace.rank_trace(measured.rank))
        reserved = 0 if on_device is None else on_device.reserved_bytes
        return DryOutcome(measured.peak_bytes, reserved_bytes=reserved)
    except (BadInputError, InconclusiveError) as error:
        return DryOutcome(None, str(error))


def collect_snapshots(target: Target, device: str, name: str, folder: Path) -> list[Path]:
    """Runs a job on tensors without memory; its snapshots go to a folder, not to where the job writes them.

    The job ends after the snapshot of this name, or else where it would end.

    Args:
        target: The job.
        device: The simulated device, a name of the catalogue.
        name: Name of the file that the job writes its snapshot to, such as ``snapshot.pickle``.
        folder: An empty folder.

    Returns:
        The snapshots in the order in which they were taken; their names end in those the job chose.

    Raises:
        CannotStartError: The job took no snapshot.
        EndedError: A signal that asks the whole command to end arrived during the run.
    """
    snapshots = folder / "snapshots"
    snapshots.mkdir()
    settings = Settings(
        output=folder / "dry.memprof",
        force=True,
        stop=True,
        dry_run=True,
        device=device,
        snapshots=snapshots,
        snapshot_name=name,
    )
    with open(os.devnull, "wb") as nothing, (folder / "errors").open("w+b") as errors:
        done = run_recorded(target, settings, nothing.fileno(), errors.fileno())
        if ending := sorted(done.signals & ENDING):
            raise EndedError(ending[0])
        errors.seek(0)
        said = errors.read().decode("utf-8", errors="replace").splitlines()
    found = sorted(snapshots.iterdir())
    if not found:
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        if done.refusal or done.returncode:
            raise CannotStartError(
                f"{target.name} took no memory snapshot: its dry run failed: {done.refusal or last[:_MOST_SAID]}"
            )
        raise CannotStartError(
            f"{target.name} took no memory snapshot in its dry run. It must call "
            "torch.cuda.memory._record_memory_history() and _dump_snapshot(), as it did for the snapshot to compare."
        )
    return found
