"""Adds expandable segments to plans whose tensors fit the budget but whose reserved segments do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from memprof.analysis.allocator.reserved import reserved_expandable, reserved_under
from memprof.analysis.plans.basis import Basis
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.explore import SearchRequest, SearchResult
from memprof.planners.search.workbench import Workbench
from memprof.policies.allocator.policy import Allocator
from memprof.policies.plan.plan import Plan
from memprof.trace.manifest import Manifest


def with_room(
    basis: Basis, manifest: Manifest, answer: SearchResult, chosen: Callable[[SearchResult], tuple[Candidate, ...]]
) -> tuple[SearchResult, tuple[Candidate, ...]]:
    """Adds ``allocator expandable_segments`` to plans that exceed the budget in reserved bytes only without it.

    Args:
        basis: The steps the plans were replayed on.
        manifest: The manifest of the recording.
        answer: The search result.
        chosen: Selects the plans to show.

    Returns:
        The search result with its best plan so changed, and the plans to show.
    """
    plans = chosen(answer)
    if not basis.step.is_on_device() or not _may(answer.search_request):
        return answer, plans
    changed = {one: _roomier(basis, manifest, one, answer.search_request.budget_bytes) for one in plans}
    fitting = tuple(changed.get(one, one) for one in answer.fitting)
    return replace(answer, fitting=fitting), tuple(changed[one] for one in plans)


def reserved_of(basis: Basis, manifest: Manifest, plan: Plan) -> int | None:
    """Returns the peak reserved bytes under a plan: as recorded without one, modelled otherwise; None on the CPU.

    The model starts with the step, so that it lacks what earlier steps left behind.

    Args:
        basis: The steps the plan was replayed on.
        manifest: The manifest of the recording.
        plan: The plan.
    """
    if not plan.policies and basis.reserved_bytes and not basis.scaled_by:
        return basis.reserved_bytes
    if plan.policies not in basis.known_reserved:
        basis.known_reserved[plan.policies] = reserved_under(basis.fullest_under(plan), manifest, plan)
    return basis.known_reserved[plan.policies]


def _may(search_request: SearchRequest) -> bool:
    name = Allocator.name
    return name not in search_request.forbid and (not search_request.allow or name in search_request.allow)


def _roomier(basis: Basis, manifest: Manifest, one: Candidate, budget_bytes: int) -> Candidate:
    if any(isinstance(policy, Allocator) for policy in one.policies):
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
