"""The commands that find another plan for a job whose plan failed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from memprof.errors import MemprofError
from memprof.policies.plan.plan import Plan
from memprof.trace.store import Trace
from memprof.units import spell_bytes, spell_bytes_below

#: Where the available memory is unknown, the next plan's budget is this share of what the current plan needs.
_LESS = 0.9


@dataclass(frozen=True)
class PlannedJob:
    """A job and the plan it ran under.

    Attributes:
        plan: The plan.
        path: Its file, None where it has none.
        words: Arguments of ``memprof record`` that run the job again; "" where they are unknown.
    """

    plan: Plan
    path: Path | None = None
    words: str = ""


def commands_over_budget(job: PlannedJob, measured_bytes: int) -> list[tuple[str, str]]:
    """Returns the commands to run after a run over its budget, each with its reason.

    A search on the recording the plan was made from subtracts the observed prediction error from the budget, as
    `memprof fit` does.
    """
    budget, prediction = job.plan.budget_bytes, job.plan.prediction
    if budget is None:
        return []
    error = measured_bytes - prediction.peak_allocated_bytes if prediction is not None else 0
    is_surprise = prediction is not None and prediction.peak_allocated_bytes <= budget
    search = budget - error if is_surprise and budget > error else budget
    return _commands(job, search_bytes=search, fit_bytes=budget)


def commands_after_failure(
    job: PlannedJob, *, ran_out: bool, room_bytes: int | None = None, forbid: str = ""
) -> list[tuple[str, str]]:
    """Returns the commands to run after a job that failed under its plan, each with its reason.

    Args:
        job: The job.
        ran_out: Whether memory ran out.
        room_bytes: Bytes torch could have allocated when memory ran out; None where unknown.
        forbid: Name of the policy at fault, "" where unknown.
    """
    if forbid:
        return _commands(job, search_bytes=job.plan.budget_bytes, fit_bytes=job.plan.budget_bytes, forbid=forbid)
    if ran_out:
        less = _less(job.plan, room_bytes)
        return _commands(job, search_bytes=less, fit_bytes=less)
    if not job.words:
        return []
    command = f"memprof record --stop -o {unused_file('without-plan', '.memprof')} {job.words}"
    return [(command, "whether the job fails without the plan, too")]


def unused_file(stem: str, suffix: str) -> str:
    """Returns an unused file name: ``plan.toml``, ``plan-2.toml``."""
    count, name = 1, f"{stem}{suffix}"
    while Path(name).exists():
        count += 1
        name = f"{stem}-{count}{suffix}"
    return shlex.quote(name)


def _commands(
    job: PlannedJob, *, search_bytes: int | None, fit_bytes: int | None, forbid: str = ""
) -> list[tuple[str, str]]:
    plan = job.plan
    without = f" --forbid {forbid}" if forbid else ""
    baseline = _baseline(job)
    if baseline is None:
        if not job.words:
            return []
        command = f"memprof fit --budget {_size(fit_bytes, plan)}{without} {job.words}"
        return [(command, "records the job, and runs it under plans until one is measured to fit")]
    ranks = next((size for policy in plan.policies if (size := getattr(policy, "world_size", None))), None)
    of_ranks = "" if ranks is None else f" --world-size {ranks}"
    written = unused_file("plan" if job.path is None else str(job.path.with_suffix("")), ".toml")
    named = shlex.quote(str(baseline))
    reason = f"a plan without {forbid}" if forbid else "a plan that leaves more room"
    commands = [
        (f"memprof suggest {named} --budget {_size(search_bytes, plan)}{without}{of_ranks} --write {written}", reason)
    ]
    if job.words:
        is_same = plan.budget_bytes is None or search_bytes == plan.budget_bytes
        # The search leaves headroom below the budget; the run is compared with the available memory.
        kept = "" if is_same or plan.budget_bytes is None else f" --budget {spell_bytes(plan.budget_bytes)}"
        commands.append((f"memprof record --plan {written}{kept} {job.words}", "train under it"))
    return commands


def _size(count: int | None, plan: Plan) -> str:
    if count is None:
        return "80%"
    return spell_bytes(count) if count == plan.budget_bytes else spell_bytes_below(count)


def _less(plan: Plan, room_bytes: int | None) -> int | None:
    """Returns a budget the plan exceeds: the available memory, or clearly less than the plan needs."""
    needs = plan.budget_bytes if plan.prediction is None else plan.prediction.peak_allocated_bytes
    if room_bytes and (needs is None or room_bytes < needs):
        return room_bytes
    return None if needs is None else max(1, int(_LESS * needs))


def _baseline(job: PlannedJob) -> Path | None:
    """Returns the recording the plan was made from, where it still exists and contains that very step."""
    prediction = job.plan.prediction
    if prediction is None or not prediction.trace:
        return None
    named = Path(prediction.trace)
    places = [named] if job.path is None else [named, job.path.parent / named]
    for place in places:
        if not place.is_file():
            continue
        try:
            trace = Trace.open(place)
            peak = max(trace.step_peaks().values(), default=0)
        except (MemprofError, OSError):
            continue  # overwritten since
        # At another batch or rank, a search on it would plan for another step.
        if peak == prediction.recorded_peak_bytes and not trace.manifest.plan:
            return place
    return None
