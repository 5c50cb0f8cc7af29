"""The largest batch, or the longest sequence, that fits a budget under some plan."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from memprof.planners.scaling.base import scale_by_shape
from memprof.planners.scaling.doubt import step_with_errors
from memprof.planners.scaling.samples import find_samples
from memprof.planners.scaling.sized import SizedStep, scale_samples
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest, SearchResult
from memprof.planners.search.workbench import Workbench
from memprof.policies.base import Policy
from memprof.policies.plan.several_steps import NO_DRY_STEPS, DrySteps
from memprof.policies.remat.policy import Remat
from memprof.trace.step import Step

#: The search ends at this multiple of the recorded size; growth models are not reliable beyond.
_MOST_TIMES = 4096

#: Steps under policies that change which kernels run, at any size, by those policies.
Framed = Mapping[tuple[Policy, ...], SizedStep]
_NONE_FRAMED: Framed = MappingProxyType({})


@dataclass(frozen=True)
class AtSize:
    """Result for one size.

    Attributes:
        size: The size.
        best: The fitting plan; None for none.
        least_bytes: The smallest upper bound of a peak found.
    """

    size: int
    best: Candidate | None
    least_bytes: int


@dataclass(frozen=True, eq=False)
class Largest:
    """The largest size that fits.

    Attributes:
        sizes: The sizes that were recorded.
        source: How steps of other sizes are estimated, one of policies.base.SOURCES.
        size: The largest size with a fitting plan; 0 for none.
        step: The step at that size, without a plan.
        answer: The plans at that size.
        tried: Result for each size tried, in ascending order.
        was_stopped: Whether the search stopped before it was complete.
        dry_steps: Steps of dry runs at that size, from which plans were predicted.
    """

    sizes: tuple[int, ...]
    source: str
    size: int
    step: Step | None
    answer: SearchResult | None
    tried: tuple[AtSize, ...]
    was_stopped: bool
    dry_steps: DrySteps = field(default_factory=dict)


def sized_step(steps: list[Step]) -> SizedStep:
    """Models how a step grows: from recordings of several sizes, or from the shapes of one.

    The size is what differs between the shapes of the recordings' inputs; for a single recording it is the batch.

    Raises:
        InconclusiveError: The recordings do not differ in size, or differ in more; or one alone is not sufficient.
    """
    if len(steps) == 1:
        return scale_by_shape(steps[0])
    advice = "Record the job twice with only the batch, or only the length, changed."
    return scale_samples(find_samples([[step] for step in steps], advice=advice).samples)


def find_largest(
    sized: SizedStep,
    search_request: SearchRequest,
    report: Callable[[Candidate], None] = lambda _: None,
    framed: Framed = _NONE_FRAMED,
) -> Largest:
    """Searches for the largest size that fits a budget under some plan, then for the fastest plan at that size.

    Sizes are doubled while a plan fits, then bisected; a size is first tried under the plans that fitted other sizes,
    and searched anew only if none fits. A plan fits if the upper bound of its peak is within the budget; the bounds
    include the error of a step at a size that was not recorded.

    Args:
        sized: The step at any size.
        search_request: The request; its time limit covers all sizes together.
        report: Called with each replayed plan.
        framed: Steps of dry runs of the same recordings, from which plans with these policies are predicted.

    Raises:
        PolicyError: Unknown policy.
    """
    if not search_request.allow:  # under a hard memory cap nearly every size fits, ever more slowly
        search_request = dataclasses.replace(search_request, forbid=(*search_request.forbid, Remat.name))
    deadline = time.monotonic() + search_request.time_limit_s
    at: dict[int, AtSize] = {}
    known: dict[tuple[Policy, ...], None] = {(): None}

    def fits(size: int) -> bool:
        if size not in at:
            step, dry_steps = step_with_errors(sized, size), _dry_steps_at(sized, framed, size)
            at[size] = _at_size(step, size, search_request, known, deadline, report, dry_steps)
        best = at[size].best
        if best is not None:
            known[best.policies] = None
        return best is not None

    start = max(sized.sizes)
    low, high = 0, start
    while high <= start * _MOST_TIMES and not _is_late(deadline) and fits(high):
        low, high = high, high * 2
    while high - low > 1 and not _is_late(deadline):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    step = step_with_errors(sized, low) if low else None
    rest = max(5.0, deadline - time.monotonic())
    answer = None
    if step is not None:
        last = dataclasses.replace(search_request, time_limit_s=rest)
        answer = explore(step, last, report, dry_steps=_dry_steps_at(sized, framed, low))
    if step is not None and answer is not None and answer.best is None:
        # The time left was too short to find the known fitting plan again.
        answer = dataclasses.replace(answer, fitting=tuple(one for one in (at[low].best,) if one is not None))
    return Largest(
        sizes=sized.sizes,
        source=sized.source,
        size=low,
        step=step,
        answer=answer,
        tried=tuple(at[size] for size in sorted(at)),
        was_stopped=high - low > 1,
        dry_steps=_dry_steps_at(sized, framed, low) if low else NO_DRY_STEPS,
    )


def _dry_steps_at(sized: SizedStep, framed: Framed, size: int) -> DrySteps:
    """Returns the steps of dry runs at a size; under micro-batches their size is that of the largest of these."""
    recorded = max(sized.sizes)
    return {
        policies: (step_with_errors(one, max(1, -(-size * max(one.sizes) // recorded))),)
        for policies, one in framed.items()
    }


def _is_late(deadline: float) -> bool:
    return time.monotonic() >= deadline


def _at_size(
    step: Step,
    size: int,
    search_request: SearchRequest,
    known: dict[tuple[Policy, ...], None],
    deadline: float,
    report: Callable[[Candidate], None],
    dry_steps: DrySteps,
) -> AtSize:
    replayed = []
    for policies in reversed(known):  # those of the nearest size first
        one = Workbench(step, deadline=math.inf, dry_steps=dry_steps).try_plan(*policies)
        if one is not None:
            report(one)
            replayed.append(one)
            if one.interval.most_bytes <= search_request.budget_bytes and _is_fast(one, step, search_request):
                return AtSize(size, one, one.interval.most_bytes)
    left = min(search_request.time_limit_s / 4, max(1.0, deadline - time.monotonic()))
    answer = explore(step, dataclasses.replace(search_request, time_limit_s=left), report, dry_steps=dry_steps)
    least = min([answer.least, *replayed], key=lambda one: one.interval.most_bytes)
    return AtSize(size, answer.best, least.interval.most_bytes)


def _is_fast(one: Candidate, step: Step, search_request: SearchRequest) -> bool:
    return search_request.most_slowdown is None or one.step_time_us <= step.duration_us * (
        1 + search_request.most_slowdown
    )
