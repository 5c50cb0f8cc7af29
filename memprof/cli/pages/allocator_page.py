"""The pages of `memprof report --allocator` and `--static`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from operator import attrgetter

from memprof.analysis.allocator.allocator_report import (
    AllocatorReport,
    Pin,
    allocator_to_json,
    build_allocator_report,
    end_to_json,
    fullest_rank,
    settings_in_force,
)
from memprof.analysis.allocator.static_report import StaticReport, build_static_report, static_to_json
from memprof.analysis.report.moments import NO_HISTORY, describe_end, is_end_state_only
from memprof.analysis.table import (
    BYTES,
    BYTES_CHANGE,
    COUNT,
    FIGURE,
    NAME,
    NUMBER,
    TEXT,
    Column,
    FactTable,
    Read,
    shown,
    sized_parts,
)
from memprof.cli.page import Page
from memprof.errors import InconclusiveError, UsageError
from memprof.replay.allocator.fragmentation import Outcome
from memprof.trace.manifest import PINNED
from memprof.trace.schema import Segments
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_bytes_change, format_percent, printable

_ROWS = 8
_AS_IF = (
    "recorded on CPU, which has no caching allocator: these are modelled for a CUDA device, whose "
    "kernels use other workspaces"
)


def show_page(
    kind: str,
    trace: Trace,
    name: str,
    rank: int | None,
    step_number: int | None,
    top: int | None,
    *,
    is_json: bool,
) -> None:
    """Prints one of the two reports.

    Args:
        kind: ``allocator`` or ``static``.
        trace: The trace.
        name: The trace's path as the user gave it.
        rank: The rank; None for the one with the highest peak.
        step_number: The step; None for the one with the highest peak.
        top: Maximum rows of the longest table; None for the default.
        is_json: Print JSON instead.
    """
    page = Page.for_stdout()
    if len(trace.ranks) > 1:
        trace = trace.rank_trace(fullest_rank(trace) if rank is None else rank)
    if trace.manifest.machine.device_name == PINNED:
        raise UsageError(
            f"{name} is of {PINNED}, whose blocks are never split: what is requested of it is in the notes."
        )
    if is_end_state_only(trace):
        _show_end(page, kind, trace, is_json=is_json)
        return
    step = trace.fullest_step() if step_number is None else trace.step(step_number)
    if kind == "static":
        planned = build_static_report(step, settings_in_force(trace.manifest, step).settings)
        record = static_to_json(planned)
        fill_static_page(page, planned, name, top)
    else:
        report = build_allocator_report(step, trace.manifest, rows=top or _ROWS)
        record = allocator_to_json(report)
        fill_allocator_page(page, report, name, top)
    if len(trace.ranks) > 1:
        record["rank"] = trace.rank
        which = ", the one with the highest peak" if rank is None else ""
        page.say(f"rank {trace.rank} of {len(trace.ranks)}{which}", "dim")
    if is_json:
        print(json.dumps(record, indent=2, allow_nan=False))
    else:
        page.write()


def _show_end(page: Page, kind: str, trace: Trace, *, is_json: bool) -> None:
    """Prints the final segments of a snapshot without a history; a static plan requires a history."""
    if kind == "static":
        raise InconclusiveError(f"{trace.path} {NO_HISTORY}, so there is no step to plan.")
    report = describe_end(trace.table(Segments))
    if is_json:
        print(json.dumps(end_to_json(report), indent=2, allow_nan=False))
        return
    unused = report.idle + report.holes
    page.say(
        f"{format_bytes(report.reserved)} are reserved; {format_bytes(unused)} of it "
        f"({_share(unused, report.reserved)}) is unused.",
        "bold",
    )
    page.say(f"The recording {NO_HISTORY}: other settings cannot be modelled.")
    parts = {
        "requested": report.requested,
        "rounding inside blocks": report.allocated + report.pending - report.requested,
        "free blocks in partly used segments": report.holes,
        "fully free segments (released by empty_cache())": report.idle,
        "reserved": report.reserved,
        "pending free (in use by another stream), included above": report.pending,
    }
    table = sized_parts("part", parts, report.reserved)
    page.add_section(f"Reserved in {report.segments:,} segments", table)
    page.write()


def fill_allocator_page(page: Page, report: AllocatorReport, trace: str, top: int | None) -> None:
    """Adds the caching allocator's behaviour in a step to a page."""
    unused = report.reserved_peak - report.at_growth.allocated
    verb = "would reserve" if report.device == "cpu" else "reserves"
    page.say(
        f"Step {report.step} {verb} {format_bytes(report.reserved_peak)} at its peak; {format_bytes(unused)} of it "
        f"({_share(unused, report.reserved_peak)}) is unused then.",
        "bold",
    )
    page.say(report.advice)
    page.say(_basis(report), "dim")
    page.add_section("Reserved memory at its first maximum", _split(report), _growth(report))
    page.add_section(
        "Segments with the most free bytes at that time",
        FactTable(SEGMENTS, report.segments[: top or _ROWS]),
        "a segment can be released once every block in it is freed",
    )
    page.add_section("The same step under other settings", _outcomes(report))
    page.add_next((f"memprof report {shlex.quote(trace)} --static", "savings of static planning"))


def fill_static_page(page: Page, report: StaticReport, trace: str, top: int | None) -> None:
    """Adds the statically planned memory of a step to a page.

    Args:
        page: The page.
        report: The static report.
        trace: The trace's path as the user gave it.
        top: Maximum rows of the operator table; None for the default.
    """
    page.say(_static_verdict(report), "bold")
    if report.device == "cpu":
        page.say(_AS_IF, "dim")
    if not report.has_reads:
        page.say("operator inputs were not recorded: storages are planned for their whole lifetime", "dim")
    page.add_section("The step, planned and not", _planned(report))
    rows, count = top or _ROWS, len(report.in_place)
    more = f"{count - rows} more operators; --top shows more" if count > rows else ""
    page.add_section("Savings of in-place results, by operator", FactTable(IN_PLACE, report.in_place[:rows]), more)
    page.add_next((f"memprof report {shlex.quote(trace)} --allocator", "where reserved memory is unused"))


IN_PLACE = (
    Column("operator", "operator", NAME),
    Column("calls", "calls", COUNT),
    Column("bytes", "results computed in place", BYTES),
    Column("saved_at_bound", "lowers the bound by", BYTES),
)


def _planned(report: StaticReport) -> FactTable:
    """Returns what the step needs under each way to place its storages."""
    rows = {
        f"all {report.storages:,} storages and workspaces, without reuse": report.total,
        "caching allocator: reserved, as modelled": report.reserved,
        "caching allocator: peak allocated": report.allocated,
        "static plan, in allocation order, best fit": report.best_fit,
        "static plan, largest first": report.greedy,
        "static plan, lowest found by search": report.searched,
        "peak live bytes, as recorded": report.kept_bound,
        "lower bound: needed at once": report.bound,
        "static plan, largest first, in place where possible": report.in_place_greedy,
        "lower bound, in place where possible": report.in_place_bound,
    }
    columns = (
        shown("method", TEXT, lambda row: row[0]),
        shown("bytes", BYTES, lambda row: row[1], missing="too many to place"),
        shown("above the bound", BYTES_CHANGE, lambda row: None if row[1] is None else row[1] - report.bound),
    )
    return FactTable(columns, rows.items())


def _basis(report: AllocatorReport) -> str:
    if report.device == "cpu":
        return printable(f"{_AS_IF}; with {report.settings}") if report.settings else _AS_IF
    settings = report.settings or "torch's defaults"
    recorded = report.recorded_reserved_peak
    if recorded is None:
        return printable(f"modelled on {report.device} with {settings}")
    off = report.reserved_peak - recorded
    apart = f"the model is off by {format_bytes_change(off)}: blocks cached before the step are unknown"
    return printable(
        f"modelled on {report.device} with {settings}; recorded: {format_bytes(recorded)}, "
        + (apart if off else "the same")
    )


def _growth(report: AllocatorReport) -> str:
    growth = report.growth
    if not growth.requested:
        return ""
    return (
        f"to serve {format_bytes(growth.requested)} for {_words(growth.what)}, with {format_bytes(growth.free_before)} "
        f"free in all and {format_bytes(growth.largest_free_before)} in one piece"
    )


def _split(report: AllocatorReport) -> FactTable:
    held = report.at_growth
    parts = {
        "requested": held.requested,
        "rounding inside blocks": held.allocated - held.requested,
        "free blocks in partly used segments": held.pinned_bytes,
        "fully free segments (released by empty_cache())": held.idle_bytes,
        "reserved": held.reserved,
        "largest free block": held.largest_free,
    }
    return sized_parts("part", parts, report.reserved_peak)


def _pinned(read: Callable[[Pin], str]) -> Read:
    return lambda segment: "" if segment.pin is None else read(segment.pin)


#: Segments that a block keeps from being released.
SEGMENTS = (
    shown("free", BYTES, attrgetter("use.free_bytes")),
    shown("of", FIGURE, lambda one: format_bytes(one.use.size) + (", growing" if one.use.is_expandable else "")),
    shown("largest free block", BYTES, attrgetter("use.largest_hole")),
    shown("blocks", NUMBER, attrgetter("use.blocks")),
    shown("largest block in it", NAME, _pinned(lambda pin: f"{format_bytes(pin.size)} {_words(pin)}")),
    shown("made at", NAME, _pinned(lambda pin: pin.line or "before the step")),
)


def _outcomes(report: AllocatorReport) -> FactTable:
    """Returns the step under other settings, those in force first."""
    now, has_retries = report.outcomes[0], any(one.retries for one in report.outcomes)

    def name(one: Outcome) -> str:
        return (one.name or "torch's defaults") + (" (now)" if one is now else "")

    def change(one: Outcome) -> int | None:
        return None if one is now else one.reserved_peak - report.reserved_peak

    columns = (
        shown("PYTORCH_ALLOC_CONF", NAME, name),
        shown("reserved peak", BYTES, attrgetter("reserved_peak")),
        shown("vs. now", BYTES_CHANGE, change),
        shown("allocated peak", BYTES, attrgetter("allocated_peak")),
        shown("segments added", COUNT, attrgetter("segments")),
        shown("cache emptied", COUNT, lambda one: one.retries if has_retries else None, is_optional=True),
        shown("failed", COUNT, lambda one: one.failed if has_retries else None, is_optional=True),
    )
    return FactTable(columns, report.outcomes)


def _static_verdict(report: StaticReport) -> str:
    best = report.bound if report.searched is None else report.searched
    would = "would reserve" if report.device == "cpu" else "reserves"
    return (
        f"Step {report.step} needs {format_bytes(report.bound)} at least and {format_bytes(best)} with a static plan; "
        f"the caching allocator {would} {format_bytes(report.reserved)}, "
        f"{format_percent((report.reserved - best) / best if best else 0.0)} more."
    )


def _words(pin: Pin) -> str:
    """Describes a block's contents: ``activation aten.addmm.default in layers.3``."""
    category = "" if pin.category == "unknown" else pin.category.replace("_", " ")
    what = " ".join(text for text in (category, pin.name) if text)
    return printable(f"{what} in {pin.module}" if pin.module and pin.module not in pin.name else what)


def _share(size: int, whole: int) -> str:
    return format_percent(size / whole) if whole else "0 %"
