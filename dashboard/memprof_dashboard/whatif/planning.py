"""Interface of the what-if page to the planners: plans for a budget, one plan's step, and recorded plans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from memprof.analysis.allocator.uncertainty import room_of
from memprof.analysis.plans.basis import Basis, basis_of, link_of
from memprof.analysis.plans.compare_planners import SHARES, Point, compare_planners
from memprof.analysis.plans.frames import frames_to_dry_run
from memprof.analysis.plans.plan_rows import stages
from memprof.analysis.plans.predict import forecast
from memprof.analysis.plans.suggest import Suggestion, suggest
from memprof.analysis.plans.verify import Verification, verify_plan
from memprof.analysis.snapshot_plans.change import SnapshotPlans, step_to_plan
from memprof.analysis.snapshot_plans.change_search import search_snapshot
from memprof.analysis.table import FactTable
from memprof.errors import MemprofError, UsageError
from memprof.machines.budget import parse_budget
from memprof.machines.catalogue import machine_of_device
from memprof.planners.base import planner_types
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.request import SearchRequest
from memprof.planners.search.workbench import allowed_names
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_tables import plan_from_tables
from memprof.policies.plan.prediction import model_of
from memprof.policies.registry import default_policies
from memprof.replay.live import live_bytes
from memprof.trace.manifest import PREDICTED
from memprof.trace.schema import Ints, Texts
from memprof_dashboard.sources import Rank, Source, Workspace
from memprof_dashboard.state import View
from memprof_dashboard.whatif.dry_frames import DryFrames

#: Most time that a search for plans takes, and each search of a planner that is compared, in seconds.
TIME_LIMIT_S = 60.0
PLANNER_LIMIT_S = 5.0
#: Plans of each search whose policies are dry-run, and searches repeated with that.
_MOST_FRAMES, _MOST_ROUNDS = 2, 2

#: A peak to read a budget against before the step is read, so that a mistake in it is reported at once.
_SOME_PEAK_BYTES = 1 << 40


def count_points() -> int:
    """Returns how many answers a comparison of the planners has; finding the planners takes half a second once."""
    return len(SHARES) * len(planner_types())


@dataclass(frozen=True)
class SearchForm:
    """A search request, as typed.

    Attributes:
        budget: The budget.
        allow: Names of the policies that may be used.
    """

    budget: str
    allow: tuple[str, ...]

    def check(self) -> None:
        """Checks the request as far as possible without a recording.

        Raises:
            UsageError: The budget is invalid, or no policy is allowed.
            PolicyError: A policy is unknown.
        """
        if not self.budget.strip():
            raise UsageError("enter a budget: a size such as 24GiB, or a share of the peak such as 60%.")
        parse_budget(self.budget, _SOME_PEAK_BYTES)
        if not self.allow:
            raise UsageError("select at least one policy.")
        allowed_names(self.allow, (), default_policies())


@lru_cache(maxsize=8)
def basis_for(rank: Rank) -> Basis:
    """Returns the steps of a recording that plans are replayed on.

    Raises:
        MemprofError: The recording holds no whole step, or is damaged.
    """
    return basis_of(rank.trace)


def find_changes(rank: Rank, form: SearchForm) -> SnapshotPlans:
    """Searches for changes under which the job of an imported snapshot fits a budget, as `memprof suggest` does.

    Raises:
        MemprofError: It shows no history of allocations, or the budget makes no sense for it.
    """
    planned, world_size = step_to_plan(rank.trace, None), max(rank.trace.manifest.world_size, 1)
    peak = int(live_bytes(planned.step).during.max(initial=0))
    return search_snapshot(rank.trace, planned, parse_budget(form.budget, peak), form.allow, world_size=world_size)


def find_plans(rank: Rank, form: SearchForm, dry_frames: DryFrames, report: Callable[[Candidate], None]) -> Suggestion:
    """Searches for plans under which a recording fits a budget.

    Policies that change kernels are estimated first; the job is dry-run under those of the best plans, and the search
    repeated with these steps.

    Args:
        rank: The recording.
        form: The search request.
        dry_frames: Dry runs of the job.
        report: Called with each plan that was replayed; a KeyboardInterrupt from it ends the search.

    Raises:
        MemprofError: The recording holds no whole step, is damaged, or the budget makes no sense for it.
    """
    basis, world_size = basis_for(rank), max(rank.trace.manifest.world_size, 1)
    peak = int(live_bytes(basis.step).during.max(initial=0))
    # The device's budget, exactly, which the field shows rounded.
    device = machine_of_device(rank.trace.manifest.machine.device_name) if counts_reserved(rank, form.budget) else None
    room = room_of(rank.trace, world_size)
    search_request = SearchRequest(
        parse_budget(form.budget if device is None else None, peak, device, room),
        allow=form.allow,
        world_size=world_size,
        time_limit_s=TIME_LIMIT_S,
        link_bytes_per_us=link_of(rank.trace),
        counts_reserved=device is not None,
        room_bytes=0 if device is None else room(),
    )
    found, estimated = suggest(rank.trace, basis, search_request, report), dict[str, None]()
    for _ in range(_MOST_ROUNDS):
        for frame in frames_to_dry_run(found, _MOST_FRAMES):
            basis, why = dry_frames.basis(rank, basis, Plan(frame), waits=True)
            estimated |= {why: None} if why else {}
        if basis.dry_steps.keys() == found.basis.dry_steps.keys():
            break
        found = suggest(rank.trace, basis, search_request, report, found)
    found = replace(found, warnings=(*found.warnings, *estimated))
    _ = found.reserved, found.host_bytes  # replayed here, beside the page, which shows them
    return found


def counts_reserved(rank: Rank, budget: str) -> bool:
    """Returns whether a budget is the device's, in which what the allocator reserves must fit, as the header says."""
    device = rank.verdict()
    return device.counts_reserved and budget.strip() == device.budget


def run_planners(rank: Rank, report: Callable[[Point], None]) -> tuple[Point, ...]:
    """Runs every planner at every budget; results before an interruption are kept.

    Args:
        rank: The recording.
        report: Called with each answer; a KeyboardInterrupt from it ends the comparison.

    Raises:
        MemprofError: The recording holds no whole step, or is damaged.
    """
    points: list[Point] = []

    def keep(point: Point) -> None:
        points.append(point)
        report(point)

    step = basis_for(rank).step
    with contextlib.suppress(KeyboardInterrupt):  # what was answered until then is the answer
        compare_planners(step, time_limit_s=PLANNER_LIMIT_S, link_bytes_per_us=link_of(rank.trace), report=keep)
    return tuple(points)


def plans_of(found: Suggestion) -> tuple[Candidate, ...]:
    """Returns every plan tried except the unmodified job: those that fit first, in search order."""
    return tuple(one for one in (*found.answer.fitting, *found.answer.others) if one.policies)


@dataclass(frozen=True, eq=False)
class Detail:
    """One plan and its predicted step.

    Attributes:
        plan: The plan with its prediction.
        policies: The table of what each policy leads to, with those before it.
        recorded: Bytes alive during each operator of the recorded step.
        recorded_phases: Phase of each of them.
        predicted: Bytes alive during each operator of the predicted step.
        predicted_phases: Phase of each of them.
    """

    plan: Plan
    policies: FactTable
    recorded: Ints
    recorded_phases: Texts
    predicted: Ints
    predicted_phases: Texts


def detail_of(rank: Rank, found: Suggestion, one: Candidate) -> Detail:
    """Replays a plan again to show its step."""
    plan = replace(one.plan, budget_bytes=found.answer.search_request.budget_bytes)
    made = forecast(rank.trace, plan, found.basis)
    return Detail(
        plan=made.plan,
        policies=stages(made),
        recorded=live_bytes(found.basis.step).during,
        recorded_phases=found.basis.step.ops.phase,
        predicted=live_bytes(made.step).during,
        predicted_phases=made.step.ops.phase,
    )


@dataclass(frozen=True)
class Run:
    """Another recording that was made under a plan.

    Attributes:
        name: What it is called on the page.
        plan: Its plan, in words.
        found: Its plan's prediction held to it; None where that cannot be done.
        refusal: Why not.
    """

    name: str
    plan: str
    found: Verification | None
    refusal: str = ""


def runs_under_plans(workspace: Workspace, view: View) -> tuple[Run, ...]:
    """Finds other recordings of the same model made under a plan, and compares each with its prediction."""
    rank = workspace.rank(view.trace, view.rank)
    others = [source for place, source in enumerate(workspace.sources) if place != view.trace]
    return tuple(run for source in others if (run := run_under_plan(rank, source, view.rank)) is not None)


def run_under_plan(rank: Rank, source: Source, number: int) -> Run | None:
    """Compares a recording with the prediction of its plan; None if it was not made under one or of another model."""
    other = source.rank(number)
    manifest = other.trace.manifest
    if manifest.plan is None or manifest.backend.name == PREDICTED or _model_of(other) != _model_of(rank):
        return None
    return _run(rank, other, source.name)


@lru_cache(maxsize=32)
def _run(rank: Rank, other: Rank, name: str) -> Run:
    words = ""
    try:
        plan = plan_from_tables(other.trace.manifest.plan or {})
        words = plan.describe()
        return Run(name, words, verify_plan(plan, other.trace, None if plan.prediction else rank.trace))
    except MemprofError as error:
        return Run(name, words, None, str(error))


@lru_cache(maxsize=32)
def _model_of(rank: Rank) -> str:
    """Returns the type of the model of a recording; "" where no step contains it."""
    number = rank.fullest_number()
    if number < 0 or not np.any(rank.steps.first_op_id >= 0):
        return ""
    step = rank.step(number)
    return model_of(step)[0]
