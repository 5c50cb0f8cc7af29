"""Plans that make a recorded job fit a budget, and the cost of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

from memprof.analysis.allocator.reserved import least_reserved, reserved_of, with_room
from memprof.analysis.allocator.uncertainty import beyond_tensors, describe_torch
from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.dry_check_results import Checked
from memprof.analysis.plans.host_budget import describe_host
from memprof.analysis.plans.predict import step_warnings
from memprof.analysis.report.notes import find_unread
from memprof.analysis.report.sources import find_sources
from memprof.planners.search.candidate import Candidate, kinds_of
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest, SearchResult
from memprof.planners.search.workbench import rank, shortest
from memprof.policies.base import NUMERICS, Policy
from memprof.policies.plan.interval import TimeInterval
from memprof.policies.plan.plan import Plan
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import Manifest
from memprof.trace.schema import CATEGORY_LABELS, Stacks
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.trace.whole_steps import has_run_out
from memprof.units import format_bytes, format_bytes_between

#: Characters that the names of all modules begin with, and that are shown.
_LONG_PREFIX = 8


@dataclass(frozen=True, eq=False)
class Suggestion:
    """The result of a search over plans, ready for display.

    Attributes:
        trace: The recording, as it was named.
        manifest: The recording's manifest.
        basis: The steps the plans were replayed on.
        answer: The full search result.
        plans: The fastest plan of each family that fits, the fastest family first, and the simplest (`with_simplest`).
        others: For each family without a plan that fits, the one closest to the budget, unless another of them is
            closer, as fast and no rougher.
        warnings: Caveats on the figures.
        ran_out: Whether memory ran out in a later step.
        dry_reserved: What the allocator reserved in dry runs of plans, by their policies, where the budget counts it.
    """

    trace: str
    manifest: Manifest
    basis: Basis
    answer: SearchResult
    plans: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    warnings: tuple[str, ...]
    ran_out: bool = False
    dry_reserved: Mapping[tuple[Policy, ...], int] = field(default_factory=dict)

    @cached_property
    def prefix(self) -> str:
        """What the names of all modules begin with, such as ``base_model.model.``; "" if it is short."""
        prefix, rest = "", [name for name in self.basis.step.modules.name.tolist() if "." in name]
        while True:
            first = {name.partition(".")[0] for name in rest}
            rest = [name.partition(".")[2] for name in rest if "." in name]
            if len(first) != 1 or not rest or any(name[0].isdecimal() for name in rest):
                return prefix if len(prefix) > _LONG_PREFIX else ""
            prefix += f"{first.pop()}."

    def short(self, text: str) -> str:
        """Returns a sentence or a cell with the names of modules below `prefix`."""
        return re.sub(rf"(?<![\w.]){re.escape(self.prefix)}(?=\w)", "", text) if self.prefix else text

    def predicted(self, one: Candidate) -> Plan:
        """Returns a plan with its prediction and the budget."""
        return self.predict(one)[0]

    def predict(self, one: Candidate) -> tuple[Plan, Step]:
        """Returns a plan with its prediction and the budget, and the resulting step."""
        plan, step = self.basis.predict(one.plan, self.trace)
        assert plan.prediction is not None  # predict adds one
        prediction = replace(plan.prediction, how=self.source_of(one), machine=self.basis.machine)
        return replace(plan, prediction=prediction, budget_bytes=self.answer.search_request.budget_bytes), step

    def with_dry_runs(self, checked: Sequence[Checked], confirmed: Candidate | None = None) -> Suggestion:
        """Returns the result with what dry runs took, and without the plans that exceeded the budget in one.

        Args:
            checked: The plans that were dry-run.
            confirmed: The one that fits: it is shown in place of the one of its family, or added.
        """
        over = {one.plan.policies for one in checked if one.fits is False}
        plans = tuple(one for one in self.plans if one.policies not in over)
        if confirmed is not None and confirmed not in plans:
            others = [one for one in plans if kinds_of(one.policies) != kinds_of(confirmed.policies)]
            plans = tuple(sorted((*others, confirmed), key=rank))
        reserved = {one.plan.policies: one.reserved_bytes for one in checked if one.reserved_bytes}
        return replace(self, plans=plans, dry_reserved=reserved)

    def time_interval(self, one: Candidate) -> TimeInterval | None:
        """Returns the bounds of a plan's step time; None where they are unknown."""
        return self.basis.time_interval(one.plan, one.step_time_us)

    @cached_property
    def simplest(self) -> int:
        """Number of the simplest plan, from 1; 0 unless it has at most half as many settings as the fastest."""
        one = simplest_of(self.plans, self.plans)
        return 0 if one is None else self.plans.index(one) + 1

    @cached_property
    def reserved(self) -> tuple[int | None, ...]:
        """Reserved bytes under each of ``plans``: of its dry run, or as modelled; None on the CPU."""
        if not self.basis.step.is_on_device():
            return (None,) * len(self.plans)
        known = self.dry_reserved
        return tuple(known.get(one.policies) or reserved_of(self.basis, self.manifest, one.plan) for one in self.plans)

    @cached_property
    def host_bytes(self) -> tuple[int, ...]:
        """Pinned host memory that the copies of each of ``plans`` take."""
        return tuple(self.basis.host_bytes_under(one.plan) for one in self.plans)

    def source_of(self, one: Candidate) -> str:
        """Returns how a plan's numbers were obtained, including the times of the step it starts from."""
        return self.basis.source_of(one.plan)


def suggest(
    trace: Trace,
    basis: Basis,
    search_request: SearchRequest,
    report: Callable[[Candidate], None] = lambda _: None,
    before: Suggestion | None = None,
) -> Suggestion:
    """Searches for plans under which a recorded job fits a budget.

    Args:
        trace: The recording.
        basis: The steps to plan for.
        search_request: The search request.
        report: Called with each replayed plan.
        before: The result of an earlier search of the basis, which had other dry steps: it is repeated only as far as
            these change it.

    Raises:
        BadInputError: The trace is damaged.
        PolicyError: Unknown policy.
    """
    answer, plans = _searched(basis, trace.manifest, search_request, report, before)
    fitting = {kinds_of(one.policies) for one in answer.fitting}
    changed = dict.fromkeys(text for one in plans for text in one.plan.caveats(basis.step))
    torch = describe_torch(trace)
    assumed = (f"the dry run {torch}.",) if torch else ()
    short = _short_on_host(answer) if answer.best is None or answer.best.policies else 0
    host = tuple(describe_host(search_request, trace, short))
    caveats = (*_describe_room(trace, search_request), *host, *changed, *_describe_unread(trace), *assumed)
    return Suggestion(
        trace=str(trace.path),
        manifest=trace.manifest,
        basis=basis,
        answer=answer,
        plans=plans,
        others=_unbeaten(one for one in one_of_each_family(answer.others) if kinds_of(one.policies) not in fitting),
        warnings=(*step_warnings(trace, basis.step), *basis.warnings, *caveats),
        ran_out=has_run_out(trace),
    )


def _describe_unread(trace: Trace) -> tuple[str, ...]:
    """Returns a sentence on each variable that holds much which no recorded step reads: no plan frees that."""
    found = find_unread(trace, trace.fullest_step(), find_sources(trace.table(Stacks)))
    return tuple(one.describe() for one in found)


def _describe_room(trace: Trace, search_request: SearchRequest) -> tuple[str, ...]:
    """Returns a sentence on memory that no rule gives to the byte: left free of a device's budget, not of a size."""
    if search_request.room_bytes:
        room = format_bytes(search_request.room_bytes)
        return (f"the budget leaves {room} of the device free for workspaces of cuDNN and cuFFT and for NCCL.",)
    manifest = trace.manifest
    if manifest.backend.name != DRY_RUN or manifest.machine.device_kind == "cpu":
        return ()
    beyond = beyond_tensors(trace)
    if not beyond.workspace_bytes[1]:
        return ()
    more = format_bytes(beyond.workspace_bytes[1])
    sentence = (
        f"peaks include estimated workspaces of {beyond.chosen_for}, which may be up to {more} larger on the device. "
        "--device leaves that free, a size does not."
    )
    return (sentence,)


def _searched(
    basis: Basis,
    manifest: Manifest,
    search_request: SearchRequest,
    report: Callable[[Candidate], None],
    before: Suggestion | None,
) -> tuple[SearchResult, tuple[Candidate, ...]]:
    """Returns the result of a search, added to that of the one before, and the plans to show."""
    known, known_steps, again = tuple[Candidate, ...](), basis.dry_steps, tuple[Candidate, ...]()
    if before is not None:
        known, known_steps = (*before.answer.fitting, *before.answer.others), before.basis.dry_steps
        again = () if before.answer.search_request.is_rough else (*before.plans, *before.others)
    reserved = least_reserved(basis, manifest, search_request)
    answer = explore(
        basis.step, search_request, report, basis.others, basis.dry_steps, known, known_steps, again, reserved
    )
    if before is not None:
        earlier = before.answer
        answer = replace(answer, tried=max(answer.tried, earlier.tried), took_s=answer.took_s + earlier.took_s)

    def shown(found: SearchResult) -> tuple[Candidate, ...]:
        others = sorted(one_of_each_family(found.fitting, shortest)[1:], key=rank)
        return with_simplest(_worth_their_policies((*found.fitting[:1], *others)), found.fitting)

    return (answer, shown(answer)) if search_request.is_rough else with_room(basis, manifest, answer, shown)


def describe_least(found: Suggestion) -> str:
    """Explains why nothing fits: the lowest peak found, and what is live there."""
    answer = found.answer
    least = answer.least
    held = describe_largest(least.categories)
    if answer.search_request.needed(least) <= answer.search_request.budget_bytes:
        if short := _short_on_host(answer):
            most = max(answer.search_request.most_host_bytes or 0, 0)
            return (
                f"No plan fits {format_bytes(answer.search_request.budget_bytes)} and the host: even the closest needs "
                f"{format_bytes(short)} more of host memory than the {format_bytes(most)} left for copies."
            )
        fastest_us = min(one.step_time_us for one in _inside(answer))
        return (
            f"No plan fits {format_bytes(answer.search_request.budget_bytes)} within the allowed slowdown: the "
            f"fastest that fits takes {fastest_us / answer.recorded.step_time_us:.2f} times the recorded step. "
            "Allow more with --max-slowdown."
        )
    more = " The search was stopped early." if answer.was_stopped else ""
    needed, budget = answer.search_request.needed(least), answer.search_request.budget_bytes
    is_reserved = needed == least.reserved_bytes
    reserved = f", for which the allocator reserves {format_bytes(needed)}" if is_reserved else ""
    return (
        f"No plan found fits {format_bytes(budget)}: the lowest peak is {describe_peak(least)} with "
        f"{least.plan.describe()}, in {place_of(least)}, with {held} live{reserved}.{more} Give at least "
        f"{format_bytes(needed)}, or allow more policies."
    )


def _short_on_host(answer: SearchResult) -> int:
    """Returns the fewest bytes by which plans that fit the device exceed the host's; 0 where none of them does."""
    most = answer.search_request.most_host_bytes
    if most is None:
        return 0
    request = answer.search_request
    inside = [one for one in (answer.least, *answer.others) if request.needed(one) <= request.budget_bytes]
    return max(min((one.host_bytes - most for one in inside), default=0), 0)


def _inside(answer: SearchResult) -> list[Candidate]:
    return [one for one in answer.others if answer.search_request.needed(one) <= answer.search_request.budget_bytes]


def describe_largest(categories: Mapping[str, int], most: int = 3) -> str:
    """Returns the largest categories and their bytes: ``activations 1.14 GiB, optimizer state 260.41 MiB``."""
    largest = sorted(categories.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{CATEGORY_LABELS.get(name, name)} {format_bytes(size)}" for name, size in largest)


def describe_peak(one: Candidate) -> str:
    """Formats a plan's predicted peak: ``43.2 MiB``, or ``43.2 to 44.1 MiB`` where it is not exact."""
    return format_bytes_between(one.interval.least_bytes, one.interval.most_bytes)


def place_of(one: Candidate) -> str:
    """Returns the place of a peak: ``backward of layers.3``."""
    return f"{one.peak_phase} of {one.peak_module}" if one.peak_module else one.peak_phase


def _worth_their_policies(plans: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Drops plans whose policies are a superset of a faster plan's."""
    kept: list[Candidate] = []
    for one in plans:
        kinds = set(kinds_of(one.policies))
        if not any(set(kinds_of(faster.policies)) < kinds for faster in kept):
            kept.append(one)
    return tuple(kept)


def _unbeaten(plans: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Drops plans that are slower than one before them and change the job's numbers as much or more."""
    kept: list[Candidate] = []
    for one in plans:
        rough = NUMERICS.index(one.numerics)
        if not any(each.step_time_us <= one.step_time_us and NUMERICS.index(each.numerics) <= rough for each in kept):
            kept.append(one)
    return tuple(kept)


def with_simplest(plans: tuple[Candidate, ...], fitting: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Adds the plan that names the fewest settings, if it names at most half as many as the fastest does.

    A plan of many module patterns is fast and hard to read, check and carry over; the difference in time is what it
    buys.
    """
    simplest = simplest_of(plans, fitting)
    more = [] if simplest is None or simplest in plans else [simplest]
    return (*plans[:1], *sorted((*plans[1:], *more), key=rank))


def simplest_of(plans: tuple[Candidate, ...], among: Iterable[Candidate]) -> Candidate | None:
    """Returns the plan that names the fewest settings, None unless it names at most half as many as the first does."""
    simplest = min(among, key=lambda one: (one.settings, one.step_time_us), default=None)
    return None if simplest is None or 2 * simplest.settings > plans[0].settings else simplest


def one_of_each_family(
    plans: Iterable[Candidate], pick: Callable[[list[Candidate]], Candidate] = itemgetter(0)
) -> tuple[Candidate, ...]:
    """Returns a plan of each family, by default the first, in the order of the families' first plans."""
    families: dict[tuple[str, ...], list[Candidate]] = {}
    for one in plans:
        families.setdefault(kinds_of(one.policies), []).append(one)
    return tuple(map(pick, families.values()))
