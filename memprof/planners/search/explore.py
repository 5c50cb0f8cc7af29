"""Searches the policy space for the fastest plans within a budget."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from memprof.errors import UsageError
from memprof.planners.base import ScheduleRequest, named_planner
from memprof.planners.graph.graph import graph_of
from memprof.planners.graph.project import project, remat_of
from memprof.planners.graph.schedule import replay
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.groups import find_groups
from memprof.planners.search.request import ScheduleSummary, SearchRequest, SearchResult
from memprof.planners.search.select import Selection
from memprof.planners.search.workbench import SAME_TIME, ReservedBytes, Workbench, allowed_names, find_frames, rank
from memprof.policies.base import Policy
from memprof.policies.compile.policy import Compile
from memprof.policies.plan.interval import OVER_HELD, time_interval_of
from memprof.policies.plan.several_steps import NO_DRY_STEPS, DrySteps, frame_of, sources_of, split_dry_run
from memprof.policies.registry import default_policies
from memprof.policies.remat.policy import Remat
from memprof.trace.step import Step

#: Number of combinations tried together with a hard memory cap.
_MOST_HELD = 6
#: Plans whose reserved bytes are modelled at most, beyond those near the budget, to say what would fit.
_MOST_COUNTED = 8
#: A plan is as fast as another if it takes no longer than this many times its step time.
_AS_FAST = 1.02


def explore(
    step: Step,
    search_request: SearchRequest,
    report: Callable[[Candidate], None] = lambda _: None,
    others: tuple[Step, ...] = (),
    dry_steps: DrySteps = NO_DRY_STEPS,
    known: Sequence[Candidate] = (),
    known_steps: DrySteps = NO_DRY_STEPS,
    again: Sequence[Candidate] = (),
    reserved: ReservedBytes | None = None,
) -> SearchResult:
    """Searches for the fastest plans whose peak is within a budget.

    Every plan is replayed as a whole on the recorded steps; sums of savings only propose plans. Combinations of the
    policies that change sizes are processed in order of the step time to expect; with each that does not fit, modules
    are chosen. A combination that alone is slower than the best plan so far is skipped: recompute only adds to it.

    An interruption (Ctrl-C) ends the search with the best so far.

    Args:
        step: The recorded step on which modules are chosen.
        search_request: The request.
        report: Called with each replayed plan.
        others: Other recorded steps, which a plan must fit as well.
        dry_steps: Steps from dry runs, which stand for predicted ones.
        known: Plans replayed in an earlier search of the same steps; those that ``dry_steps`` leave as they were are
            not replayed again.
        known_steps: That search's steps from dry runs.
        again: Those of them that are replayed on ``dry_steps`` first: nothing is searched for if one of them fits and
            is as fast as the fastest was.
        reserved: Returns what the allocator reserves under a plan, if the request counts it; None on the CPU.

    Raises:
        PolicyError: Unknown policy.
        UsageError: A budget for copies in host memory, of a job that ran there.
    """
    if search_request.most_host_bytes is not None and not step.targets_device():
        raise UsageError(
            "host= and pinned= bound the copies that plans for a GPU make in host memory; this job ran there itself: "
            "give one size."
        )
    started = time.monotonic()
    allowed = allowed_names(search_request.allow, search_request.forbid, default_policies())
    deadline = started + search_request.time_limit_s
    needed = search_request.needed
    bench = Workbench(
        step,
        deadline=deadline,
        report=report,
        others=others,
        needed=needed,
        dry_steps=dry_steps,
        most_host_bytes=search_request.most_host_bytes,
        counts_host=search_request.is_unified,
        impossible=search_request.impossible,
        reserved=reserved if search_request.counts_reserved and not search_request.is_rough else None,
        counted_bytes=search_request.budget_bytes,
    )
    known = [one for one in known if not bench.refusals_of(one.policies)]
    before = [one for one in known if bench.may_fit(one, search_request.budget_bytes)]
    bench.archive |= {
        one.policies: one
        for one in known
        if split_dry_run(one.policies, (), dry_steps)[0] is split_dry_run(one.policies, (), known_steps)[0]
    }
    recorded = bench.try_plan()
    assert recorded is not None  # an empty plan is never refused
    recorded = bench.counted(recorded)
    schedule, was_interrupted = None, False
    if bench.needed(recorded) > search_request.budget_bytes:
        try:
            for policies in _compiled(search_request):
                bench.try_plan(*policies)
            if _still_fits(bench, before, again, search_request):
                pass
            elif search_request.planner == "auto":
                frames = _search(bench, allowed, search_request)
                if _may_rematerialise(bench, search_request) and (
                    search_request.allow or not _fast_enough(bench, search_request)
                ):
                    _hold(bench, frames, search_request)
            else:
                schedule = _follow(bench, search_request)
        except KeyboardInterrupt:
            bench.was_stopped = was_interrupted = True
    answer = _answer(bench, search_request, recorded, time.monotonic() - started)
    return dataclasses.replace(answer, was_interrupted=was_interrupted, schedule=schedule)


def _still_fits(
    bench: Workbench, before: list[Candidate], again: Sequence[Candidate], search_request: SearchRequest
) -> bool:
    """Replays plans of an earlier search; returns whether the fastest that fits is as fast as the fastest was."""
    for one in again:
        bench.try_plan(*one.policies)
    fastest = bench.fastest(search_request.budget_bytes)
    if not again or fastest is None:
        return False
    return fastest.step_time_us <= _AS_FAST * min((one.step_time_us for one in before), default=0.0)


def _compiled(search_request: SearchRequest) -> tuple[tuple[Policy, ...], ...]:
    """Returns the plans that compile; where none was run, one that is refused with instructions for running it."""
    if Compile.name in search_request.forbid:
        return ()
    is_open = not search_request.allow or Compile.name in search_request.allow
    return search_request.measured or (((Compile(),),) if is_open else ())


def _search(bench: Workbench, allowed: set[str], search_request: SearchRequest) -> list[tuple[Policy, ...]]:
    """Chooses modules for every combination of the other policies, and returns those combinations."""
    selection = Selection(bench, allowed, search_request.budget_bytes)
    frames = find_frames(bench, allowed, world_size=search_request.world_size)
    if search_request.is_rough:
        frames = list(filter(frame_of, frames))
    else:
        frames = selection.ordered(frames)
    if search_request.frames is not None:
        frames = [frame for frame in frames if frame_of(frame) in search_request.frames]
    for frame in frames:
        base = bench.try_plan(*frame)
        if bench.is_late():
            break
        if base is None or bench.host_excess(base):
            continue
        best = bench.fastest(search_request.budget_bytes)
        # Without other policies the numbers stay the same, which may be worth a slower step.
        is_promising = best is None or not frame or base.step_time_us < best.step_time_us
        if not bench.fits(base, search_request.budget_bytes) and is_promising:
            selection.choose(frame, roughly=search_request.is_rough)
    if search_request.is_rough:
        return frames
    selection.refine()
    selection.narrow()
    # A part of what is only estimated is not worth its search.
    selection.narrow_frames(frame for frame in frames if "rule" not in sources_of(frame, bench.dry_steps))
    selection.refine()
    selection.shorten()
    return frames


def _to_hold(search_request: SearchRequest) -> str:
    """Returns the budget for remat, with a margin for the overshoot seen in jobs."""
    return str(int(search_request.budget_bytes / (1 + OVER_HELD)))


def _may_rematerialise(bench: Workbench, search_request: SearchRequest) -> bool:
    """Whether remat may be used: on a device where it has not been run yet, only when named."""
    if Remat.name in search_request.forbid or search_request.allow:
        return Remat.name in search_request.allow and Remat.name not in search_request.forbid
    return not bench.step.targets_device()


def _hold(bench: Workbench, frames: list[tuple[Policy, ...]], search_request: SearchRequest) -> None:
    """Adds a hard memory cap, held by remat, to the fastest combinations compatible with it."""
    held = 0
    for frame in frames:
        found = bench.try_plan(*frame, Remat(budget=_to_hold(search_request), exceeds=True))
        held += found is not None
        if held == _MOST_HELD or bench.is_late():
            break


def _follow(bench: Workbench, search_request: SearchRequest) -> ScheduleSummary:
    """Chooses the modules that run again by following a planner's schedule."""
    graph = graph_of(bench.step)
    # Half of the time, so that the other half is left to choose modules.
    deadline = (time.monotonic() + bench.deadline) / 2
    found = named_planner(search_request.planner)().search(
        ScheduleRequest(graph, search_request.budget_bytes, deadline, search_request.link_bytes_per_us)
    )
    if found.runs is None:
        return ScheduleSummary(search_request.planner, found.status, found.reason, 0, 0.0)
    done = replay(graph, found.runs, found.moves)
    project(bench, graph, found, find_groups(bench.step), search_request.budget_bytes)
    if _may_rematerialise(bench, search_request):
        policy = remat_of(bench.step, graph, found.runs)
        exact = None if policy is None else bench.try_plan(policy)
        if policy is not None and exact is not None and not bench.fits(exact, search_request.budget_bytes):
            bench.try_plan(dataclasses.replace(policy, budget=_to_hold(search_request), exceeds=True))
    time_us = graph.duration_us + done.extra_us + done.stall_us
    return ScheduleSummary(search_request.planner, found.status, found.reason, done.peak_bytes, time_us)


def _fast_enough(bench: Workbench, search_request: SearchRequest) -> list[Candidate]:
    """Returns the plans within budget and slowdown limit, fastest first.

    Before them comes one that takes no longer than the job does now and has fewer policies than the fastest, where
    that may be slower, as far as the times of its policies are known; of those about as fast, the one of the fewest
    settings. It is no slower than what comes first within any smaller budget.
    """
    slowest, recorded_us = float("inf"), bench.archive[()].step_time_us
    if search_request.most_slowdown is not None:
        slowest = recorded_us * (1 + search_request.most_slowdown)
    fits = [one for one in bench.fitting(search_request.budget_bytes) if one.step_time_us <= slowest]
    needed, first, most_us, last_us = [bench.needed(one) for one in fits], 0, recorded_us, float("inf")
    for budget_bytes in sorted(set(needed)):
        within = [place for place in range(len(fits)) if needed[place] <= budget_bytes]
        fastest = fits[within[0]]
        bounds = time_interval_of(fastest.policies, bench.step, fastest.step_time_us)
        most_us = min(most_us, 0.0 if bounds is None else bounds.most_us)
        simpler = (place for place in within if len(fits[place].policies) < len(fastest.policies))
        first = next((place for place in simpler if fits[place].step_time_us <= most_us), within[0])
        last_us = min(last_us, SAME_TIME * fits[first].step_time_us)
        about = (place for place in within if fits[place].step_time_us <= last_us)
        first = min(about, key=lambda place: (fits[place].settings, place != first))
        last_us = fits[first].step_time_us
        most_us = min(recorded_us, last_us)
    return [*fits[first : first + 1], *fits[:first], *fits[first + 1 :]]


def _least(bench: Workbench) -> Candidate:
    """Returns the plan that needs least, reserved bytes included where the budget counts them."""

    def order(one: Candidate) -> tuple[Any, ...]:
        return bench.host_excess(one) > 0, bench.needed(one), *rank(one)

    for _ in range(_MOST_COUNTED):
        least = min(bench.archive.values(), key=order)
        if bench.is_counted(least):
            return least
        bench.modelled(least)
    return min(filter(bench.is_counted, bench.archive.values()), key=order, default=least)


def _answer(bench: Workbench, search_request: SearchRequest, recorded: Candidate, took_s: float) -> SearchResult:
    least = _least(bench)
    fits = _fast_enough(bench, search_request)
    inside = set(map(id, fits))
    others = sorted(
        (one for one in bench.archive.values() if id(one) not in inside and one.policies),
        key=lambda one: (
            max(0, bench.needed(one) - search_request.budget_bytes) + bench.host_excess(one),
            *rank(one),
        ),
    )
    return SearchResult(
        search_request=search_request,
        recorded=recorded,
        fitting=tuple(fits),
        others=tuple(others),
        refused=tuple(
            (", ".join(policy.describe() for policy in policies), sentence)
            for policies, sentence in bench.refused.items()
        ),
        least=least,
        was_stopped=bench.was_stopped,
        tried=len(bench.archive),
        took_s=took_s,
    )
