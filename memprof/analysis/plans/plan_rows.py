"""The tables of plans: of a search on a recording or a snapshot, of dry runs, and of one plan policy by policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from memprof.analysis.plans.predict import Forecast
from memprof.analysis.plans.suggest import Suggestion, describe_largest, place_of
from memprof.analysis.snapshot_plans.change import SnapshotPlan
from memprof.analysis.table import (
    BYTES,
    BYTES_CHANGE,
    FIGURE,
    FLOATS,
    NAMES,
    NUMBER,
    NUMBERS,
    OBJECT,
    RATIO_CHANGE,
    SIZES,
    TEXT,
    TEXTS,
    TRUTH,
    US,
    WORDS,
    Column,
    FactTable,
    rows_of,
    shown,
)
from memprof.planners.search.candidate import Candidate
from memprof.policies.base import Policy
from memprof.policies.plan.plan_tables import settings_of
from memprof.policies.plan.several_steps import NO_DRY_STEPS, DrySteps, sources_of
from memprof.units import format_bytes_between, format_bytes_change

#: Rows of a table of plans, at most.
MOST_ROWS = 10
_NUMERICS = shown(
    "numerics", TEXT, lambda one: "bit-identical" if one.numerics == "none" else one.numerics, key="effect"
)


@dataclass(frozen=True)
class PolicyRow:
    """A policy of a plan, with its settings and its effect on the job's numbers.

    Attributes:
        policy: Its name.
        settings: Its settings; None for a change to a snapshot, which no plan file holds.
        describe: What it does, in words.
        numerics: Its effect on the numbers of the job, one of policies.base.NUMERICS.
        how: How its effect was obtained, one of policies.base.SOURCES.
        advice: How to apply it, where memprof does not.
        assumes: What its sizes assume, a clause.
    """

    policy: str
    settings: Mapping[str, Any] | None
    describe: str
    numerics: str
    how: str
    advice: str | None = None
    assumes: str | None = None


POLICIES = (
    Column("policy", None),
    Column("settings", None, OBJECT),
    Column("describe", None),
    Column("numerics", None),
    Column("how", None),
)
#: Policies of suggested plans.
CHANGES = (
    *POLICIES,
    shown("change", TEXT, attrgetter("describe")),
    Column("advice", "how", WORDS),
    Column("assumes", "assumes", WORDS),
)


def policy_row(policy: Policy, numerics: str, how: str) -> PolicyRow:
    """Returns a policy as a row."""
    return PolicyRow(policy.name, settings_of(policy), policy.describe(), numerics, how)


@dataclass(frozen=True)
class PlanRow:
    """A plan that a search found.

    Attributes:
        found: The plan, as the search has it.
        number: Its place among those that fit, as ``--explain`` takes it; None for others.
        describe: Its policies, in words.
        bounds: Least and most bytes to expect of the peak.
        phase: Phase of the peak.
        module: Module of the peak.
        recorded_bytes: The peak as recorded.
        how: How its numbers were obtained, one of policies.base.SOURCES.
        policies: Its policies.
        reserved_bytes: Peak of reserved bytes, of its dry run or as modelled; None where unknown.
        expandable_bytes: The same with expandable segments.
        host_bytes: Pinned host memory of its copies; None where unknown.
        step_time_us: Its step time; None where unknown.
        times_us: Least and most microseconds to expect of the step time.
        slowdown: Its step time against the recorded one, 0.1 for 10 % more.
        changes: What it changes beyond rounding, and in the job's loop.
        over: By how much it exceeds the budget.
        short: Its policies as shown, where names of modules are shortened; "" for the same words.
        place: Phase and module of the peak as shown; "" for the phase alone.
    """

    found: Candidate | SnapshotPlan
    number: int | None
    describe: str
    bounds: Sequence[int]
    phase: str
    module: str
    recorded_bytes: int
    how: str
    policies: Sequence[PolicyRow]
    reserved_bytes: int | None = None
    expandable_bytes: int | None = None
    host_bytes: int | None = None
    step_time_us: float | None = None
    times_us: Sequence[float] | None = None
    slowdown: float | None = None
    changes: Sequence[str] = ()
    over: str = ""
    short: str = ""
    place: str = ""

    @property
    def numerics(self) -> str:
        """Its effect on the numbers of the job, one of policies.base.NUMERICS."""
        return self.found.numerics


def _predicted(one: PlanRow) -> int | None:
    """Returns the peak where it is not the only one to expect."""
    return one.found.peak_bytes if len(set(one.bounds)) > 1 else None


_PEAK = (
    Column("describe", None, WORDS),
    shown("plan", NAMES, lambda one: one.short or one.describe, key="short"),
    shown("peak", FIGURE, lambda one: format_bytes_between(*one.bounds)),
    shown("predicted", BYTES, _predicted, meaning="without the errors of other jobs", is_optional=True, gives_way=8),
)
_SOURCE = Column("how", "source", gives_way=3)
_PLACE = shown("peak in", TEXT, lambda one: one.place or one.phase, gives_way=1)
PLANS = (
    Column("fits", None, TRUTH, lambda one: one.number is not None),
    shown("", NUMBER, attrgetter("number"), key="number"),
    *_PEAK,
    Column("peak_allocated_bytes", None, BYTES, attrgetter("found.peak_bytes")),
    Column("peak_interval_bytes", None, NUMBERS, attrgetter("bounds")),
    Column(
        *("peak_reserved_bytes", "reserved", BYTES, attrgetter("reserved_bytes")),
        "of its dry run, or as modelled",
        is_optional=True,
    ),
    Column(
        "peak_reserved_expandable_bytes",
        "expandable",
        BYTES,
        attrgetter("expandable_bytes"),
        is_optional=True,
        gives_way=7,
    ),
    Column("host_bytes", None, BYTES),
    shown("on the host", BYTES, lambda one: one.host_bytes or None, missing="-", is_optional=True),
    Column("saved_bytes", "saved", BYTES, lambda one: one.recorded_bytes - one.found.peak_bytes, gives_way=6),
    Column("step_time_us", "step time", US, is_optional=True, gives_way=5),
    Column("step_time_interval_us", None, FLOATS, attrgetter("times_us")),
    Column("slowdown", "change", RATIO_CHANGE, is_optional=True),
    _PLACE,
    Column("peak_phase", None, TEXT, attrgetter("phase")),
    Column("peak_module", None, TEXT, lambda one: one.module or None),
    _SOURCE,
    Column("numerics", None),
    replace(_NUMERICS, gives_way=4),
    Column("changes", None, TEXTS),
    Column("at_peak", None, SIZES, attrgetter("found.categories")),
    Column("policies", None, rows_of(CHANGES)),
)
OVER_BUDGET = (
    *_PEAK,
    shown("over by", FIGURE, attrgetter("over")),
    shown("change", RATIO_CHANGE, attrgetter("slowdown"), is_optional=True),
    _PLACE,
    shown("largest category", TEXT, lambda one: describe_largest(one.found.categories, 1), gives_way=2),
    replace(_SOURCE, in_json=False),
    replace(_NUMERICS, gives_way=4),
)
REFUSED = (Column("plan", "plan", TEXT, lambda one: one[0]), Column("reason", "reason", WORDS, lambda one: one[1]))


def rows_of_search(found: Suggestion) -> tuple[list[PlanRow], list[PlanRow]]:
    """Returns the plans of a search that fit, and those that do not."""
    figures = zip(found.plans, found.reserved, found.host_bytes, strict=True)
    fitting = [_plan_row(found, one, number, *more) for number, (one, *more) in enumerate(figures, start=1)]
    return fitting, [_plan_row(found, one, None) for one in found.others]


def _plan_row(
    found: Suggestion, one: Candidate, number: int | None, reserved: int | None = None, host: int | None = None
) -> PlanRow:
    recorded, times = found.answer.recorded, found.time_interval(one)
    return PlanRow(
        found=one,
        number=number,
        describe=one.plan.describe(),
        bounds=one.interval.bounds,
        phase=one.peak_phase,
        module=one.peak_module,
        recorded_bytes=recorded.peak_bytes,
        how=found.source_of(one),
        policies=policy_rows(one, found.basis.dry_steps),
        reserved_bytes=reserved,
        host_bytes=host,
        step_time_us=one.step_time_us,
        times_us=None if times is None else times.bounds,
        slowdown=one.step_time_us / recorded.step_time_us - 1 if recorded.step_time_us else None,
        changes=one.plan.caveats(found.basis.step),
        over="" if number is not None else _over_by(found, one),
        short=found.short(one.plan.describe()),
        place=found.short(place_of(one)),
    )


def policy_rows(one: Candidate, dry_steps: DrySteps = NO_DRY_STEPS) -> list[PolicyRow]:
    """Returns the policies of a candidate."""
    return list(map(policy_row, one.policies, one.words, sources_of(one.policies, dry_steps)))


def _over_by(found: Suggestion, one: Candidate) -> str:
    """Returns the bytes by which a plan, or what is reserved for it, exceeds the device's budget, or the host's."""
    request = found.answer.search_request
    over = request.needed(one) - request.budget_bytes
    host_over = 0 if request.most_host_bytes is None else one.host_bytes - request.most_host_bytes
    if over > 0:
        return format_bytes_change(over) + (", reserved" if request.needed(one) == one.reserved_bytes else "")
    return f"{format_bytes_change(host_over)} on the host" if host_over > 0 else "too slow"


def shortest_refused(found: Suggestion) -> list[tuple[str, str]]:
    """Returns what is not possible, each with its reason: of the plans that share one, the shortest."""
    by_reason: dict[str, str] = {}
    for plan, reason in sorted(found.answer.refused, key=lambda one: len(one[0])):
        by_reason.setdefault(reason, plan)
    return [(plan, reason) for reason, plan in by_reason.items()]


def plan_tables(
    fitting: Sequence[PlanRow],
    others: Sequence[PlanRow],
    refused: Iterable[tuple[str, str]],
    order: str = "the fastest of each kind, and the simplest",
    kind: str = "closest candidate of each kind",
    most: int = MOST_ROWS,
) -> list[tuple[str, FactTable, str]]:
    """Returns the tables of a search, each with its title and a remark."""
    return [
        ("Plans that fit", FactTable(PLANS, fitting[:most]), order),
        ("Over budget", FactTable(OVER_BUDGET, others[:most]), kind),
        ("Not possible here", FactTable(REFUSED, list(refused)[:most]), ""),
    ]


#: A plan policy by policy, each on top of those before it.
STAGES = (
    Column("policy", None, TEXT, lambda stage: stage.policy.name),
    Column("settings", None, OBJECT, lambda stage: settings_of(stage.policy)),
    Column("describe", "policy", NAMES, lambda stage: stage.policy.describe()),
    Column("peak_allocated_bytes", "peak", BYTES),
    shown("change", BYTES_CHANGE, attrgetter("change_bytes")),
    Column(
        *("peak_reserved_bytes", "reserved", BYTES, attrgetter("reserved_bytes"), "as modelled"),
        is_optional=True,
        gives_way=2,
    ),
    Column("host_bytes", None, BYTES),
    shown("on the host", BYTES, lambda stage: stage.host_bytes or None, missing="-", is_optional=True, gives_way=1),
    Column("step_time_us", "step time", US),
    Column("how", "source"),
    Column("numerics", None),
    _NUMERICS,
    Column("changes", None, TEXTS),
)


def stages(made: Forecast) -> FactTable:
    """Returns a plan policy by policy, below the recorded step."""
    table = FactTable(STAGES, made.stages)
    recorded = made.recorded
    table.add(
        "rest",
        describe="as recorded",
        peak_allocated_bytes=recorded.peak.allocated_bytes,
        peak_reserved_bytes=recorded.reserved_bytes,
        step_time_us=recorded.step_time_us,
    )
    table.rows.insert(0, table.rows.pop())
    return table
