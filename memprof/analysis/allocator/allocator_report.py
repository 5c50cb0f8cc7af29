"""The caching allocator's view of a step: reserved bytes, how much of them is unused, and which settings would help."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from memprof.analysis.ranks.rank_report import compare_ranks
from memprof.analysis.report.moments import EndState
from memprof.analysis.report.sources import Sources, find_sources
from memprof.errors import BadInputError
from memprof.json_values import Json, inline, key, to_json
from memprof.policies.allocator.policy import Allocator, parse_options
from memprof.policies.plan.plan_tables import plan_from_tables
from memprof.replay.allocator.events import replay
from memprof.replay.allocator.fragmentation import (
    ALTERNATIVES,
    Fragmentation,
    Outcome,
    SegmentUse,
    describe,
    fragmentation_at,
    last_growth,
    outcome,
    size_at,
)
from memprof.replay.allocator.rules import Settings, settings_from_options
from memprof.replay.allocator.steps import StepRequests, device_of, requests_of_step
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import PREDICTED, Manifest
from memprof.trace.schema import NONE
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_percent

#: Version of the JSON's keys.
ALLOCATOR_SCHEMA = 1
#: Savings below this share of the reserved bytes do not justify a setting.
_WORTHWHILE = 0.01


@dataclass(frozen=True)
class Pin:
    """A block that keeps its segment from being released.

    size: Requested bytes.
    category: Its category.
    name: The parameter or buffer, else the operator that allocated it.
    module: Its module, "" outside any module.
    line: The user's line that allocated it, "" where unknown.
    """

    size: int = field(metadata=key("requested_bytes"))
    category: str
    name: str
    module: str
    line: str


@dataclass(frozen=True)
class PinnedSegment:
    """A segment with free bytes, and the largest block that pins it; None where the segment is entirely free."""

    use: SegmentUse = field(metadata=inline())
    pin: Pin | None = field(metadata=key("largest_block"))


@dataclass(frozen=True)
class Growth:
    """The last request that made the allocator reserve more memory.

    Attributes:
        requested: Requested bytes.
        free_before: Total free bytes before the request.
        largest_free_before: Size of the largest free block before the request, in bytes.
        what: What requested them.
    """

    requested: int = field(metadata=key("requested_bytes"))
    free_before: int = field(metadata=key("free_bytes_before"))
    largest_free_before: int = field(metadata=key("largest_free_block_before_bytes"))
    what: Pin = field(metadata=key("for"))


@dataclass(frozen=True, eq=False)
class AllocatorReport:
    """The caching allocator's view of a step.

    Attributes:
        step: Number of the step.
        device: Device of the memory; ``cpu`` where the step ran there, in which case the rest is what a GPU would do.
        settings: The settings in force, in the syntax of torch's environment variable.
        reserved_peak: Peak reserved bytes, as modelled.
        recorded_reserved_peak: Peak reserved bytes as recorded; None where not recorded.
        allocated_peak: Peak bytes in allocated blocks.
        at_growth: Reserved and used bytes when reserved bytes first reached their peak.
        growth: The request that caused that peak.
        at_end: Reserved and used bytes after the step.
        segments: The segments with the most free bytes at that moment.
        outcomes: Results under the settings in force (first) and under alternatives.
        best: The recommended outcome; None where no setting saves enough.
        advice: One sentence.
    """

    step: int
    device: str
    settings: str
    reserved_peak: int = field(metadata=key("reserved_peak_bytes"))
    recorded_reserved_peak: int | None = field(metadata=key("recorded_reserved_peak_bytes"))
    allocated_peak: int = field(metadata=key("allocated_peak_bytes"))
    at_growth: Fragmentation = field(metadata=key("at_reserved_peak"))
    growth: Growth = field(metadata=key("last_growth"))
    at_end: Fragmentation = field(metadata=key("after_step"))
    segments: tuple[PinnedSegment, ...]
    outcomes: tuple[Outcome, ...] = field(metadata=key("under_settings"))
    best: Outcome | None = field(metadata=key("best_settings", lambda best: best and best.name))
    advice: str


def build_allocator_report(step: Step, manifest: Manifest, rows: int = 8) -> AllocatorReport:
    """Replays a step through the allocator model, under the settings in force and under alternatives.

    Args:
        step: The step, recorded or predicted.
        manifest: The recording's manifest: the settings in force and the device's capacity.
        rows: Number of segments to describe.

    Raises:
        BadInputError: torch does not accept the recorded settings.
        PolicyError: The plan of a predicted step is from a newer memprof.
    """
    issued = requests_of_step(step)
    in_force = settings_in_force(manifest, step)
    settings, current = in_force.settings, in_force.text
    done = replay(issued.requests, settings)
    event = last_growth(done)
    before = describe(replay(issued.requests, settings, until=event).allocator)
    at_growth = fragmentation_at(issued.requests, settings, event)
    sources = find_sources(step.stacks)
    outcomes = [outcome(done, current)]
    for name, other in ALTERNATIVES:
        if (bounded := dataclasses.replace(other, capacity_bytes=settings.capacity_bytes)) != settings:
            outcomes.append(outcome(replay(issued.requests, bounded), name))
    recorded = int(step.memory.reserved_bytes.max(initial=NONE)) if issued.device != "cpu" else NONE
    actual = outcomes[0].reserved_peak if recorded == NONE else min(recorded, outcomes[0].reserved_peak)
    best = _best(outcomes, actual)
    allocation = int(issued.requests.allocation[event]) if len(issued.requests) else NONE
    return AllocatorReport(
        step=step.number,
        device=issued.device,
        settings=current,
        reserved_peak=outcomes[0].reserved_peak,
        recorded_reserved_peak=None if recorded == NONE else recorded,
        allocated_peak=outcomes[0].allocated_peak,
        at_growth=at_growth,
        growth=Growth(
            requested=size_at(issued.requests, event) if allocation != NONE else 0,
            what=_pin(issued, step, sources, allocation),
            free_before=before.idle_bytes + before.pinned_bytes,
            largest_free_before=before.largest_free,
        ),
        at_end=describe(done.allocator),
        segments=tuple(
            PinnedSegment(use, _pin(issued, step, sources, use.pins[0]) if use.pins else None)
            for use in at_growth.segments[:rows]
            if use.free_bytes
        ),
        outcomes=tuple(outcomes),
        best=best,
        advice=_advice(outcomes[0], best, at_growth, actual),
    )


@dataclass(frozen=True)
class SettingsInForce:
    """Allocator settings of a step, parsed and in the syntax of torch's variable; "" for the defaults."""

    settings: Settings
    text: str


def settings_in_force(manifest: Manifest, step: Step) -> SettingsInForce:
    """Returns the allocator settings a step was recorded with, or those of the plan it is predicted under.

    Args:
        manifest: The manifest of the step's recording.
        step: The step. The environment of a job on CPU is ignored.

    Raises:
        BadInputError: torch does not accept the recorded settings.
        PolicyError: The plan of a predicted step is from a newer memprof.
    """
    is_on_device = device_of(step) != "cpu"
    options = parse_options(manifest.machine.allocator_settings) if is_on_device else {}
    plan = manifest.plan or {}
    if manifest.backend.name == PREDICTED and Allocator.name in plan:
        for one in plan_from_tables({Allocator.name: plan[Allocator.name]}).policies:
            options |= one.options() if isinstance(one, Allocator) else {}
    text = ",".join(f"{key}:{value}" for key, value in options.items())
    # A dry run's device has unlimited memory where the job does not fit.
    is_bounded = is_on_device and manifest.backend.name != DRY_RUN
    capacity = (manifest.machine.capacity_bytes or None) if is_bounded else None
    try:
        return SettingsInForce(settings_from_options(options, capacity_bytes=capacity), text)
    except ValueError:
        raise BadInputError(f"the recording has allocator options that torch does not accept: {text}.") from None


def fullest_rank(trace: Trace) -> int:
    """Returns the rank whose fullest step has the most live bytes, the lowest rank on ties.

    Raises:
        BadInputError: A rank's tables are damaged.
    """
    worst = compare_ranks(trace).worst
    return trace.ranks[0] if worst is None else worst


def reserved_peak(step: Step, settings: Settings | None = None) -> int:
    """Returns the modelled peak reserved bytes of a step, recorded or predicted."""
    done = replay(requests_of_step(step).requests, settings)
    return int(done.reserved().max(initial=0))


def _best(outcomes: list[Outcome], actual: int) -> Outcome | None:
    """Picks the least reserved bytes serving every request; on near ties expandable segments, which waste no size.

    Args:
        outcomes: The outcome under the settings in force, then those under others.
        actual: Peak reserved bytes without a change: as recorded, or less where the model reaches less.
    """
    current = outcomes[0]
    working = [one for one in outcomes if one.failed <= current.failed]
    least = min(working, key=lambda one: one.reserved_peak)
    near = [one for one in working if one.reserved_peak <= least.reserved_peak * (1 + _WORTHWHILE / 2)]
    chosen = next((one for one in near if one.settings.expandable_segments), least)
    saved = actual - chosen.reserved_peak
    return chosen if chosen is not current and saved > _WORTHWHILE * actual else None


def _advice(current: Outcome, best: Outcome | None, at_growth: Fragmentation, actual: int) -> str:
    if best is not None:
        saved = actual - best.reserved_peak
        return (
            f"Set PYTORCH_ALLOC_CONF={best.name or 'to nothing'}: reserved memory peaks at "
            f"{format_bytes(best.reserved_peak)} instead of {format_bytes(actual)}, "
            f"{format_bytes(saved)} less."
        )
    unused = current.reserved_peak - at_growth.allocated
    holes = sum(1 for use in at_growth.segments if use.free_bytes and use.blocks)
    return (
        f"No allocator setting would help: none tried lowers the reserved peak by {format_percent(_WORTHWHILE)}. The "
        f"{format_bytes(unused)} unused at that moment are spread over {holes:,} segments with live blocks."
    )


def _pin(issued: StepRequests, step: Step, sources: Sources, allocation: int) -> Pin:
    if allocation == NONE:
        return Pin(0, "", "", "", "")
    storage, made_by = int(issued.storage_id[allocation]), int(issued.made_by[allocation])
    op_name = "" if made_by == NONE else str(step.ops.name[made_by])
    stack = NONE if made_by == NONE else int(step.ops.stack_id[made_by])
    frames = () if stack == NONE else sources.user_frames[stack]
    # Stacks of a snapshot may start with C++ frames, or contain nothing else.
    places = (frame.place for frame in frames if frame.file.endswith(".py"))
    module_id = int(step.ops.module_id[made_by]) if storage == NONE else int(step.storages.module_id[storage])
    return Pin(
        size=int(issued.requests.size[allocation]),
        category="workspace" if storage == NONE else str(step.storages.category[storage]),
        name=(str(step.storages.name[storage]) if storage != NONE else "") or op_name,
        module=str(step.modules.name[module_id]) or str(step.modules.type[module_id]) if module_id != NONE else "",
        line=next(places, "outside Python" if frames else ""),
    )


def allocator_to_json(report: AllocatorReport) -> Json:
    """Returns the allocator's report: bytes, stable keys."""
    return {
        "schema": ALLOCATOR_SCHEMA,
        "has_history": True,
        "step": report.step,
        "device": report.device,
        "is_as_if_on_cuda": report.device == "cpu",
        **to_json(report),
        "under_settings": [
            {"settings": one.name, "is_in_force": place == 0, **to_json(one)}
            for place, one in enumerate(report.outcomes)
        ],
    }


def end_to_json(report: EndState) -> Json:
    """Returns the segments of a snapshot without a history: bytes, stable keys."""
    found = to_json(report)
    # With a history, `segments` lists them.
    return {"schema": ALLOCATOR_SCHEMA, "has_history": False, "segment_count": found.pop("segments"), **found}
