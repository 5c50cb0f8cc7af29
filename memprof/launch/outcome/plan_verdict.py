"""The parent's verdict on a job's plan and budget: prediction against measurement, and what to do on failure."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from memprof.analysis.diff.budget import BudgetVerdict, has_measured_step, judge_budget, why_unmeasured
from memprof.analysis.out_of_memory.post_mortem import examine
from memprof.analysis.plans.another_plan import PlannedJob, commands_after_failure, commands_over_budget, unused_file
from memprof.analysis.plans.verify import describe_short, verify_plan
from memprof.errors import MemprofError
from memprof.launch.outcome.verdict import Verdict
from memprof.policies.plan.plan import Plan
from memprof.policies.swap.policy import Swap
from memprof.trace.store import Trace
from memprof.units import format_bytes, spell_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        has_failed: By an error, or by a signal that is not used to end jobs.
        ran_out: Whether memory ran out, or may have.
        was_killed: Whether the kernel killed it for lack of host memory.
        fault: Name of the policy that raised its error, "" if unknown.
    """

    has_failed: bool = False
    ran_out: bool = False
    was_killed: bool = False
    fault: str = ""


def add_plan(verdict: Verdict, job: PlannedJob | None, ended: Ended, recording: Path | None) -> Verdict:
    """Adds to a verdict how accurate the plan's prediction was, and what happened to the job under the plan.

    Args:
        verdict: What was recorded.
        job: The job and its plan; None if it ran under none.
        ended: How it ended.
        recording: The recording; None if there is none.
    """
    if job is None:
        return verdict
    trace = _guarded(lambda: None if recording is None else Trace.open(recording), lambda _: None)
    is_measured = _guarded(lambda: trace is not None and has_measured_step(trace), lambda _: False)
    if ended.has_failed and (ended.ran_out or ended.fault or not is_measured):
        return _add_failure(verdict, job, ended, trace, is_measured=is_measured)
    plan = job.plan
    if plan.prediction is None or trace is None:
        return verdict
    if not is_measured:
        return replace(verdict, comparison=f"its prediction is not compared: {why_unmeasured(trace)}.")
    command = f"memprof verify {shlex.quote(str(job.path))} {shlex.quote(str(recording))}" if job.path else ""
    return replace(verdict, comparison=_comparison(plan, trace), next_command=command or verdict.next_command)


def add_budget(
    verdict: Verdict, job: PlannedJob | None, budget_bytes: int | None, recording: Path | None, words: str
) -> Verdict:
    """Adds to a verdict whether the run stayed within the budget, and otherwise the command that finds a plan.

    Args:
        verdict: What was recorded.
        job: The job and its plan; None if it ran under none.
        budget_bytes: The budget; None if there is none.
        recording: The recording; None if there is none.
        words: Arguments to ``memprof record`` that run the job again.
    """
    if budget_bytes is None or recording is None:
        return verdict
    try:
        found = judge_budget(Trace.open(recording), budget_bytes)
    except Exception as error:  # noqa: BLE001 - the job's own exit status must survive memprof's bugs
        return replace(verdict, budget=BudgetVerdict(budget_bytes, None, unknown=_told(error)))
    verdict = replace(verdict, budget=found)
    if found.fits is not False or found.measured_bytes is None or verdict.has_failed:
        return verdict
    if job is None:
        written = unused_file("plan", ".toml")
        rank = "" if found.rank is None else f" --rank {found.rank}"
        size = f"--budget {spell_bytes(budget_bytes)}"
        search = f"memprof suggest {shlex.quote(str(recording))}{rank} {size} --write {written}"
        return replace(verdict, next_command=search, then=(f"memprof record --plan {written} {words}",))
    peak = found.measured_bytes
    return _with_commands(verdict, _guarded(lambda: commands_over_budget(job, peak), lambda _: []))


def describe_refused(job: PlannedJob, fault: str) -> Verdict | None:
    """Returns the verdict with the command that finds another plan after a policy refused the job; None if unknown."""
    if not fault:
        return None
    commands = _guarded(lambda: commands_after_failure(job, ran_out=False, forbid=fault), lambda _: [])
    verdict = Verdict(f"it was to run under {_named(job)}. Its policy {fault} does not fit.")
    return _with_commands(verdict, commands)


def _add_failure(verdict: Verdict, job: PlannedJob, ended: Ended, trace: Trace | None, *, is_measured: bool) -> Verdict:
    """Adds the plan under which the job failed, and the command that finds a plan that may not."""
    fault = ended.fault
    sentences = [f"it ran under {_named(job)}."]
    if fault:
        sentences.append(f"The error was raised in its policy {fault}.")
    elif ended.was_killed and _holds_in_host(job.plan) and (trace is None or _is_on_device(trace)):
        fault = Swap.name
        sentences.append("swap keeps in host memory what it moves off the device.")
    if is_measured and job.plan.prediction is not None and trace is not None:
        sentences.append(f"In the steps recorded: {_comparison(job.plan, trace)}")
    elif job.plan.prediction is not None:
        sentences.append("Its prediction is not compared: no complete step after the warm-up was recorded.")
    room = _guarded(lambda: _room(trace), lambda _: None)
    commands = _guarded(
        lambda: commands_after_failure(job, ran_out=ended.ran_out, room_bytes=room, forbid=fault), lambda _: []
    )
    return _with_commands(replace(verdict, comparison=" ".join(sentences), has_failed=True), commands)


def _with_commands(verdict: Verdict, commands: list[tuple[str, str]]) -> Verdict:
    if not commands:
        return verdict
    first, *more = (command for command, _ in commands)
    return replace(verdict, next_command=first, then=tuple(more))


def _named(job: PlannedJob) -> str:
    budget = job.plan.budget_bytes
    of_budget = "" if budget is None else f", for a budget of {format_bytes(budget)}"
    return f"{'a plan' if job.path is None else job.path}: {job.plan.describe()}{of_budget}"


def _comparison(plan: Plan, trace: Trace) -> str:
    return _guarded(
        lambda: describe_short(verify_plan(plan, trace)), lambda why: f"the prediction cannot be compared: {why}."
    )


def _room(trace: Trace | None) -> int | None:
    found = None if trace is None else examine(trace)
    return None if found is None or found.is_caught else found.room_bytes


def _holds_in_host(plan: Plan) -> bool:
    return any(isinstance(policy, Swap) and policy.to == "host" for policy in plan.policies)


def _is_on_device(trace: Trace) -> bool:
    return trace.manifest.machine.device_kind != "cpu"


def _guarded(look: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """Returns the result of `look`; on an error, of `otherwise`: the job's exit status must survive memprof's bugs."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - see above
        return otherwise(_told(error))


def _told(error: Exception) -> str:
    return str(error).rstrip(".") if isinstance(error, MemprofError) else f"{type(error).__name__}: {error}"
