"""The output of `memprof suggest` where plans cannot be replayed: an imported snapshot, or no complete step."""

from __future__ import annotations

from typing import Any

from memprof.analysis.allocator.uncertainty import room_of
from memprof.analysis.out_of_memory.out_of_memory_words import describe_failure, next_steps
from memprof.analysis.plans.partial_step import PartialStep, examine_partial
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.analysis.plans.plan_rows import PLANS, REFUSED
from memprof.analysis.plans.predict import words_for_record
from memprof.analysis.snapshot_plans.change import SnapshotPlans, step_to_plan
from memprof.analysis.snapshot_plans.change_search import search_snapshot
from memprof.analysis.snapshot_plans.snapshot_words import (
    NEEDS,
    caveats,
    describe_recorded,
    rows_of_snapshot,
    tables,
    verdict,
)
from memprof.analysis.table import BYTES, TEXT, WORDS, FactTable, records, shown
from memprof.cli.options.suggest_options import SuggestOptions
from memprof.cli.page import Page, show
from memprof.cli.pages.next_commands import again
from memprof.errors import GateFailedError, InconclusiveError, UsageError
from memprof.planners.search.request import MakeSearchRequest
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace
from memprof.units import format_bytes


def suggest_for_partial(opened: Trace, search_request: MakeSearchRequest, *, is_json: bool) -> int:
    """Prints what a recording without a complete step shows; returns the exit code for an inconclusive result.

    Args:
        opened: The recording.
        search_request: Makes the search request, whose budget is used, from the recorded peak.
        is_json: Print JSON instead of a page.
    """
    found = examine_partial(opened)
    budget_bytes = search_request(found.least_bytes, room_of(opened)).budget_bytes
    show(
        lambda page: _fill_partial(page, found, budget_bytes),
        lambda: _partial_to_json(found, budget_bytes),
        is_json=is_json,
    )
    return InconclusiveError.exit_code


_PARTS = (
    shown("what", TEXT, lambda part: part[0]),
    shown("bytes", BYTES, lambda part: part[1]),
    shown("source", WORDS, lambda part: part[2]),
)


def _fill_partial(page: Page, found: PartialStep, budget_bytes: int) -> None:
    budget = format_bytes(budget_bytes)
    least = format_bytes(found.least_bytes)
    page.say(
        f"No plan yet: {found.trace} contains no complete step, so the memory of backward and the "
        f"optimizer is unknown. The peak of a complete step is at least {least}.",
        "bold",
    )
    failure = found.failure
    if failure is not None and not failure.is_caught:
        page.say(describe_failure(failure))
    reached = [(str(part.key or "other").replace("_", " "), part.bytes, "recorded") for part in found.reached.parts]
    if found.asked_bytes:
        reached.append(("failed request", found.asked_bytes, "recorded"))
    page.add_section("Peak of the recorded part", FactTable(_PARTS, reached), found.moment.describe())
    known = f"; that of {', '.join(found.unknown)} is not known" if found.unknown else ""
    live = (
        ("parameters, buffers", found.parameter_bytes, "recorded"),
        ("gradients", found.gradient_bytes, "same size as the trained parameters"),
        ("optimizer state", found.state_bytes, f"by the optimizer's class and settings{known}"),
    )
    page.add_section("Live in every update", FactTable(_PARTS, live), f"{format_bytes(found.update_bytes)} in all")
    page.add("")
    for sentence in fits_at_all(found, budget_bytes):
        page.say(sentence)
    page.add_next(*_next_commands(found, budget))


def _next_commands(found: PartialStep, budget: str) -> list[tuple[str, str]]:
    """Returns the commands that lead to a plan, or to a whole step where memory did not run out."""
    if found.failure is not None and not found.failure.is_caught:
        return next_steps(found.failure, found.trace, found.manifest, budget.replace(" ", ""))
    return [(f"memprof record --stop -o whole.memprof {words_for_record(found.manifest)}", "a whole step")]


def fits_at_all(found: PartialStep, budget_bytes: int) -> list[str]:
    """Returns which parts alone exceed the budget, and how large a batch could be."""
    budget = format_bytes(budget_bytes)
    if found.update_bytes > budget_bytes:
        over = format_bytes(found.update_bytes - budget_bytes)
        sentence = (
            f"No batch fits {budget} without a plan: parameters, gradients and optimizer state alone are {over} over. "
            "To shrink these: --shard, --swap of them, --precision pure-bf16, an optimizer with less state."
        )
        return [sentence]
    sentences = []
    if found.seen_bytes > budget_bytes:
        state = ", optimizer state included" if found.state_missing_bytes else ""
        sentences.append(
            f"Without a plan, the job does not fit {budget}: the recorded part of its step needs "
            f"{format_bytes(found.seen_bytes)}{state}."
        )
    else:
        sentences.append(f"The recorded part of the step fits {budget}; whether the rest does is unknown.")
    largest = found.largest_batch(budget_bytes)
    if largest is not None and found.batch is not None and largest < found.batch:
        sentences.append(f"The largest batch that can fit is therefore {largest}, of {found.batch} recorded.")
    return sentences


def _partial_to_json(found: PartialStep, budget_bytes: int) -> dict[str, Any]:
    largest = found.largest_batch(budget_bytes)
    return {
        "schema": PLAN_SCHEMA,
        "conclusive": False,
        "budget_bytes": budget_bytes,
        "plans": [],
        "least_peak_bytes": found.least_bytes,
        "update_bytes": found.update_bytes,
        "reached": {
            "step": found.moment.step,
            "phase": found.moment.phase,
            "module": found.moment.module,
            "op": found.moment.op,
            "allocated_bytes": found.reached.total_bytes,
            "asked_bytes": found.asked_bytes,
            "by_category": {str(part.key or "other"): part.bytes for part in found.reached.parts},
        },
        "parameter_bytes": found.parameter_bytes,
        "gradient_bytes": found.gradient_bytes,
        "optimizer_state_bytes": found.state_bytes,
        "optimizer_state_missing_bytes": found.state_missing_bytes,
        "recorded_batch": found.batch,
        "largest_batch": largest,
        "next": _next_commands(found, format_bytes(budget_bytes))[0][0],
    }


def suggest_for_snapshot(opened: Trace, search_request: MakeSearchRequest, given: SuggestOptions) -> int:
    """Prints what would make the job of an imported snapshot fit.

    Returns:
        The exit code: 4 if nothing fits.

    Raises:
        UsageError: An option needs operators.
    """
    runs = (given.target, given.check, given.compile_runs, given.cluster, *given.compiled)
    if any((given.written, given.explained, given.size.option, *runs)):
        raise UsageError(
            f"{given.trace} is imported and has no operators: suggest takes --budget, --device, --allow, --forbid, "
            "--world-size, --step, --rank and --json for it. For plan files and other sizes, record the job itself "
            "with memprof record (or --dry-run)."
        )
    planned = step_to_plan(opened, given.step_number)
    peak = int(live_bytes(planned.step).during.max(initial=0))
    request = search_request(peak, room_of(opened, given.world_size), world_size=given.world_size)
    found = search_snapshot(
        opened,
        planned,
        request.budget_bytes,
        request.allow,
        request.forbid,
        request.world_size,
        counts_reserved=request.counts_reserved,
    )
    show(lambda page: _fill_snapshot(page, found), lambda: _snapshot_to_json(found), is_json=given.is_json)
    return 0 if found.recorded_fits or found.fitting else GateFailedError.exit_code


def _fill_snapshot(page: Page, found: SnapshotPlans) -> None:
    page.say(verdict(found), "bold")
    for line in describe_recorded(found):
        page.say(line, "dim")
    page.warn(*caveats(found))
    if found.recorded_fits:
        return
    for table in tables(found):
        page.add_section(*table)
    page.add("")
    page.say(NEEDS, "dim")
    if not found.fitting:
        page.add_next((again("--budget", str(found.needed_bytes), without=("--device", "--machine")), "what fits"))


def _snapshot_to_json(found: SnapshotPlans) -> dict[str, Any]:
    recorded = found.recorded
    is_open = not found.recorded_fits and not found.fitting
    return {
        "schema": PLAN_SCHEMA,
        "trace": found.trace,
        "step": recorded.step.number,
        "budget_bytes": found.budget_bytes,
        "recorded": {
            "peak_allocated_bytes": recorded.peak_bytes,
            "peak_phase": recorded.phase,
            "step_time_us": None,
            "peak_reserved_bytes": recorded.reserved_bytes,
            "peak_reserved_expandable_bytes": recorded.expandable_bytes,
        },
        "minimum_feasible_bytes": found.needed_bytes,
        "plans": records(PLANS, [row for rows in rows_of_snapshot(found) for row in rows]),
        "refused": records(REFUSED, found.refused),
        "reason": verdict(found) if is_open else "",
        "warnings": [found.remark] if found.remark else [],
        "is_approximate": True,
        "needs": NEEDS,
        "replayed_plans": found.tried,
    }
