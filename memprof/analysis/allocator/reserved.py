"""Reserved bytes of the caching allocator under a plan, and expandable segments where these do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from memprof.analysis.allocator.allocator_report import reserved_peak, settings_in_force
from memprof.analysis.plans.basis import Basis
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.request import SearchRequest, SearchResult
from memprof.planners.search.workbench import ReservedBytes, Workbench
from memprof.policies.allocator.policy import Allocator
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_tables import plan_to_tables
from memprof.trace.manifest import PREDICTED, Manifest
from memprof.trace.step import Step


def reserved_under(step: Step, manifest: Manifest, plan: Plan | None = None) -> int | None:
    """Returns the modelled peak reserved bytes of a step.

    Args:
        step: The step, recorded or predicted.
        manifest: The manifest of its recording.
        plan: The plan it is predicted under; its allocator options apply.

    Returns:
        Bytes; None for a step on the CPU, whose allocator reserves nothing.

    Raises:
        BadInputError: torch does not accept the recorded settings.
    """
    if not step.is_on_device():
        return None
    return reserved_peak(step, settings_in_force(_with(manifest, plan), step).settings)


def reserved_expandable(step: Step, manifest: Manifest) -> int | None:
    """Returns the same with expandable segments, which fragment least; None where they are in force."""
    if not step.is_on_device():
        return None
    in_force = settings_in_force(manifest, step).settings
    if in_force.expandable_segments:
        return None
    return reserved_peak(step, replace(in_force, expandable_segments=True))


def _with(manifest: Manifest, plan: Plan | None) -> Manifest:
    if plan is None:
        return manifest
    tables: Mapping[str, Any] = plan_to_tables(plan)
    backend = replace(manifest.backend, name=PREDICTED)
    return replace(manifest, plan=dict(tables), backend=backend)


def with_room(
    basis: Basis, manifest: Manifest, answer: SearchResult, chosen: Callable[[SearchResult], tuple[Candidate, ...]]
) -> tuple[SearchResult, tuple[Candidate, ...]]:
    """Adds ``allocator expandable_segments`` to plans that exceed the budget in reserved bytes only without it.

    Returns:
        The search result with its best plan so changed, and the plans to show.
    """
    plans = chosen(answer)
    if not basis.step.is_on_device() or not _may(answer.search_request):
        return answer, plans
    changed = {one: _roomier(basis, manifest, one, answer.search_request.budget_bytes) for one in plans}
    fitting = tuple(changed.get(one, one) for one in answer.fitting)
    return replace(answer, fitting=fitting), tuple(changed[one] for one in plans)


def reserved_of(basis: Basis, manifest: Manifest, plan: Plan, step: Step | None = None) -> int | None:
    """Returns the peak reserved bytes under a plan: as recorded without one, modelled otherwise; None on the CPU.

    The model starts with the step, so that it lacks what earlier steps left behind.

    Args:
        basis: The steps the plan was replayed on.
        manifest: The manifest of the recording.
        plan: The plan.
        step: The fullest of the steps under it; None to obtain it.
    """
    if not plan.policies and basis.reserved_bytes and not basis.scaled_by:
        return basis.reserved_bytes
    if plan.policies not in basis.known_reserved:
        step = basis.fullest_under(plan) if step is None else step
        basis.known_reserved[plan.policies] = reserved_under(step, manifest, plan)
    return basis.known_reserved[plan.policies]


def least_reserved(basis: Basis, manifest: Manifest, search_request: SearchRequest) -> ReservedBytes | None:
    """Returns a function for the reserved bytes of plans, with expandable segments if only these fit; None on the CPU.

    Args:
        basis: The steps the plans are replayed on.
        manifest: The manifest of the recording.
        search_request: The budget, and whether a plan may set the allocator.
    """
    if not basis.step.is_on_device():
        return None

    def reserved(plan: Plan, step: Step) -> int:
        in_force = reserved_of(basis, manifest, plan, step) or 0
        if in_force <= search_request.budget_bytes or not _may(search_request) or _sets_allocator(plan):
            return in_force
        return min(in_force, reserved_expandable(step, manifest) or in_force)

    return reserved


def _may(search_request: SearchRequest) -> bool:
    name = Allocator.name
    return name not in search_request.forbid and (not search_request.allow or name in search_request.allow)


def _sets_allocator(plan: Plan) -> bool:
    return any(isinstance(policy, Allocator) for policy in plan.policies)


def _roomier(basis: Basis, manifest: Manifest, one: Candidate, budget_bytes: int) -> Candidate:
    if _sets_allocator(one.plan):
        return one
    reserved = reserved_of(basis, manifest, one.plan)
    if reserved is None or reserved <= budget_bytes:
        return one
    expandable = reserved_expandable(basis.fullest_under(one.plan), manifest)
    if expandable is None or expandable > budget_bytes:
        return one
    bench = Workbench(basis.step, deadline=math.inf, others=basis.others, dry_steps=basis.dry_steps)
    roomier = bench.try_plan(*one.policies, Allocator(expandable_segments=True))
    return one if roomier is None else replace(roomier, host_bytes=one.host_bytes)
