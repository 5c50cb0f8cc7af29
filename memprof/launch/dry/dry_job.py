"""Dry-runs a job under a plan: measures the plan's peak as applied, before spending a real run on it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from memprof.analysis.allocator.dry_fit import dry_fit
from memprof.analysis.plans.dry_check_results import Checked
from memprof.errors import BadInputError, InconclusiveError, MemprofError, UsageError
from memprof.launch.dry.dry_plan import check_plan
from memprof.launch.dry.isolation import command_apart
from memprof.launch.fit.attempt import measure
from memprof.launch.outcome.verdict import describe_status
from memprof.launch.parent.parent import ENDING, Recorded, run_recorded
from memprof.launch.parent.settings import DryWindow, Settings
from memprof.launch.parent.target import CannotStartError, NotFoundError, Target, find_command, find_module, find_script
from memprof.machines.card import find_card
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.explore import SearchRequest
from memprof.policies.plan.plan import Plan
from memprof.trace.manifest import Manifest
from memprof.trace.secrets.masking import MASK, is_masked
from memprof.trace.store import Trace

#: Appended if an isolated job failed: it may have needed files or network access that isolation denies.
_WHILE_APART = "(It had no network; isolate = false under [tool.memprof.dry_run] in pyproject.toml allows it.)"
#: Maximum characters of an error's last line in messages.
_MOST_SAID = 300
#: A recorded window that ends later is not followed: a dry run would take too long to reach it.
_LAST_STEP = 16


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
    """

    peak_bytes: int | None
    reason: str = ""
    was_started: bool = True
    reserved_bytes: int = 0

    def checked(self, plan: Plan, one: Candidate, request: SearchRequest) -> Checked:
        """Compares the run with the budget: what was reserved counts where that is a device's.

        Args:
            plan: The plan, as it was run.
            one: The plan, as it was found.
            request: The search request.
        """
        return Checked(
            plan,
            one.peak_bytes,
            request.budget_bytes,
            self.peak_bytes,
            self.reason,
            one.interval.most_bytes,
            self.reserved_bytes if request.counts_reserved else 0,
        )


def find_recorded_job(manifest: Manifest) -> Target:
    """Returns the job of a recording, to be started from the current folder.

    Raises:
        CannotStartError: The recording lacks the job's command line, was made under a plan, or is a dry run of ranks.
        NotFoundError: Its script or program is missing here.
        NotExecutableError: It cannot be run.
    """
    command = manifest.command
    if not command:
        raise CannotStartError(
            "The recording does not say how its job was started, so that cannot be dry-run: record it with memprof "
            "record."
        )
    if is_masked(command):
        raise CannotStartError(
            f"The recording holds its job's command line with secrets masked ({MASK}), so that cannot be dry-run: "
            "record it with --keep-arguments, or verify the plan with a real run, memprof record --plan."
        )
    if manifest.plan:
        raise CannotStartError(
            "The job was recorded under a plan already, on top of which a dry run applies no other: search in a "
            "recording of the job as it is."
        )
    if manifest.dry_ranks:
        raise CannotStartError(
            f"The recording is a dry run of {manifest.dry_ranks:,} ranks, of which its command starts only one: check "
            f"the plan with memprof record --dry-run --ranks {manifest.dry_ranks} --plan plan.toml."
        )
    words = command[1:]
    try:
        if not Path(command[0]).name.startswith("python") or not words or words[0] in ("-", "-c"):
            return find_command(command)
        if words[0] == "-m":
            return find_module(words[1:])
        return find_command(command) if words[0].startswith("-") else find_script(words)
    except NotFoundError as error:
        raise NotFoundError(f"{error} Run the command in the folder where the job was recorded.") from None


def find_recorded_device(manifest: Manifest) -> str:
    """Returns the device that a dry run of a recording's job must simulate; "" for the CPU.

    Raises:
        CannotStartError: It was recorded on a device that a dry run cannot simulate.
    """
    machine = manifest.machine
    if machine.device_kind == "cpu":
        return ""
    try:
        return find_card(machine.device_name).machine.name
    except UsageError:
        raise CannotStartError(
            f"The job was recorded on {machine.device_name or 'a device without a name'}, which dry runs do not "
            "model: verify the plan with a real run, memprof record --plan."
        ) from None


def cover_recorded_steps(window: DryWindow, manifest: Manifest) -> DryWindow:
    """Returns the window of a dry run that is compared with a recording: the recorded steps.

    Other steps may be smaller, such as those with shorter batches or without an evaluation.

    Args:
        window: The configured window; kept where its steps were chosen.
        manifest: The recording's.
    """
    recorded = manifest.window
    if window.is_chosen or not recorded.steps or recorded.skip + recorded.steps > _LAST_STEP:
        return window
    return replace(window, skip=recorded.skip, steps=recorded.steps)


def dry_run(
    target: Target,
    plan: Plan | None,
    window: DryWindow,
    device: str = "",
    keep: Path | None = None,
    *,
    apart: bool = False,
) -> DryOutcome:
    """Runs a job on tensors without memory and returns its peak. The job's output is discarded.

    Args:
        target: The job.
        plan: The plan to apply; None for the unmodified job.
        window: Steps to skip, and to record.
        device: The simulated device; "" for the CPU.
        keep: Path for the recording; None to discard it.
        apart: Isolate the job: writes in this folder are redirected, and it has no network (``isolation``).

    Raises:
        EndedError: A signal that asks the whole command to end arrived during the run.
    """
    try:
        check_plan(plan)
    except CannotStartError as error:
        return DryOutcome(None, str(error), was_started=False)
    try:
        scratch = tempfile.TemporaryDirectory(prefix="memprof-dry-")
    except OSError as error:
        reason = f"a dry run needs a temporary folder, and none can be written ({error.strerror or error}): set TMPDIR."
        return DryOutcome(None, reason, was_started=False)
    with scratch as folder:
        settings = Settings(
            output=keep or Path(folder, "dry.memprof"),
            force=True,
            skip=window.skip,
            steps=window.steps,
            stop=True,
            dry_run=True,
            device=device,
            plan=plan,
        )
        with open(os.devnull, "wb") as nothing, open(Path(folder, "errors"), "w+b") as errors:
            try:
                within = command_apart(Path(folder)) if apart else ()
                done = run_recorded(target, settings, nothing.fileno(), errors.fileno(), within)
            except MemprofError as error:
                return DryOutcome(None, str(error), was_started=False)
            if ending := sorted(done.signals & ENDING):
                raise EndedError(ending[0])
            errors.seek(0)
            outcome = _outcome(done, errors.read().decode("utf-8", errors="replace"))
            return replace(outcome, reason=f"{outcome.reason} {_WHILE_APART}") if apart and done.returncode else outcome


def _outcome(done: Recorded, errors: str) -> DryOutcome:
    if done.refusal:
        return DryOutcome(None, done.refusal)
    if done.returncode:
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
        return DryOutcome(None, f"the job failed in a dry run, {describe_status(done.returncode)}: {last[:_MOST_SAID]}")
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
