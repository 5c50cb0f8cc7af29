"""The output of `memprof suggest` for an imported snapshot."""

from __future__ import annotations

from typing import Any

from memprof.analysis.allocator.uncertainty import room_of
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.analysis.plans.plan_rows import PLANS, REFUSED
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
from memprof.analysis.table import records
from memprof.cli.options.suggest_options import SuggestOptions
from memprof.cli.page import Page, show
from memprof.cli.pages.next_commands import again
from memprof.errors import GateFailedError, UsageError
from memprof.planners.search.request import MakeSearchRequest
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace


def suggest_for_snapshot(opened: Trace, search_request: MakeSearchRequest, given: SuggestOptions) -> int:
    """Prints what would make the job of an imported snapshot fit.

    Args:
        opened: The snapshot.
        search_request: Makes the search request from the peak.
        given: The options.

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
    show(lambda page: _fill(page, found), lambda: _json(found), is_json=given.is_json)
    return 0 if found.recorded_fits or found.fitting else GateFailedError.exit_code


def _fill(page: Page, found: SnapshotPlans) -> None:
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


def _json(found: SnapshotPlans) -> dict[str, Any]:
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
