"""The page of `memprof largest`: the largest batch, or the longest sequence, that fits."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from memprof.analysis.plans.another_plan import unused_file
from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.analysis.plans.plan_rows import POLICIES, policy_rows
from memprof.analysis.plans.suggest import describe_peak, place_of
from memprof.analysis.table import (
    BYTES,
    FIGURE,
    NAMES,
    NUMBER,
    TEXT,
    TRUTH,
    US,
    Column,
    FactTable,
    record,
    records,
    row_of,
    rows_of,
    shown,
)
from memprof.cli.page import Page, show
from memprof.cli.pages.next_commands import again
from memprof.cli.pages.plan_page import fill_basis
from memprof.cli.progress import SearchBar
from memprof.errors import GateFailedError, PolicyError
from memprof.planners.scaling.sized import SizedStep
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.largest import AtSize, Largest, find_largest, sized_step
from memprof.planners.search.request import MakeSearchRequest, SearchRequest
from memprof.policies.base import Policy
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.plan.plan_tables import SOURCES_IN_WORDS
from memprof.policies.plan.several_steps import NO_DRY_STEPS, DrySteps, frame_of
from memprof.replay.live import live_bytes
from memprof.units import format_bytes, format_us

#: Most sets of policies that the job is dry-run under.
_MOST_FRAMES = 6


def show_largest(
    bases: list[Basis],
    trace: str,
    job: str,
    search_request: MakeSearchRequest,
    what: str,
    written: Path | None,
    dry_run: Callable[[tuple[Policy, ...]], tuple[list[Basis], str]],
    *,
    is_json: bool,
) -> int:
    """Runs the search, writes the plan and prints the result.

    Args:
        bases: The steps of the recordings, each at another size; a budget in percent refers to the first one's peak.
        trace: The first recording's path as the user gave it.
        job: Arguments of ``memprof record`` that run its job.
        search_request: Makes the search request from the recorded peak.
        what: ``batch`` or ``sequence``.
        written: Path for the plan; None to write none.
        dry_run: Returns the bases with the steps of dry runs under policies, and why they are estimated instead.
        is_json: Print JSON instead.

    Returns:
        The exit code.
    """
    request = search_request(int(live_bytes(bases[0].step).during.max(initial=0)))
    sized, framed = sized_step([basis.step for basis in bases]), dict[tuple[Policy, ...], SizedStep]()
    estimated = ""
    while True:
        with SearchBar(request) as bar:
            found = find_largest(sized, request, bar.add, framed)
        best = None if found.answer is None else found.answer.best
        frame = frame_of(best.policies) if best is not None else ()
        if not frame or frame in framed or len(framed) + len(request.impossible) >= _MOST_FRAMES:
            break
        try:
            learned, estimated = dry_run(frame)
        except PolicyError as error:  # the job refuses it
            request = dataclasses.replace(request, impossible={**request.impossible, frame: str(error)})
            continue
        if estimated:
            break
        framed |= {each: sized_step([one.dry_steps[each][0] for one in learned]) for each in learned[0].dry_steps}
    if written is not None and best is not None and best.policies and found.step is not None:
        at: dict[str, Any] = {"at_batch" if what == "batch" else "at_length": found.size}
        plan, _ = dataclasses.replace(best.plan, **at).predict(found.step, trace=trace, dry_steps=found.dry_steps)
        assert plan.prediction is not None
        # The prediction is only as certain as the step it starts from.
        prediction = dataclasses.replace(plan.prediction, how=found.source, machine=bases[0].machine)
        write_plan(written, dataclasses.replace(plan, prediction=prediction, budget_bytes=request.budget_bytes))
    show(
        lambda page: _fill(page, found, best, request, what, bases[0], trace, job, written, estimated),
        lambda: _json(found, best, request, what, estimated),
        is_json=is_json,
    )
    return 0 if best is not None else GateFailedError.exit_code


def _fill(
    page: Page,
    found: Largest,
    best: Candidate | None,
    search_request: SearchRequest,
    what: str,
    basis: Basis,
    trace: str,
    job: str,
    written: Path | None,
    estimated: str,
) -> None:
    noun = {"batch": "Largest batch", "sequence": "Longest sequence"}[what]
    budget = format_bytes(search_request.budget_bytes)
    if best is None:
        least = min(found.tried, key=lambda one: one.least_bytes)
        page.say(
            f"No {what} fits {budget}: at {least.size} the lowest peak is {format_bytes(least.least_bytes)}.", "bold"
        )
        return
    plan = best.plan.describe() if best.policies else "the job as it is"
    page.say(
        f"{noun} within {budget}: {found.size}, with {plan}; peak {describe_peak(best)}, step "
        f"{format_us(best.step_time_us)}.",
        "bold",
    )
    if estimated:
        page.warn(estimated)
    if found.was_stopped:
        page.warn("the search was stopped early; a larger one may fit.")
    if found.size > 4 * max(found.sizes):
        page.warn(
            f"{found.size} is far from what was recorded ({', '.join(map(str, found.sizes))}); record "
            "the job closer to it, and add that recording with --also."
        )
    page.say(
        f"recorded at {', '.join(map(str, found.sizes))}; steps of other sizes are "
        f"{SOURCES_IN_WORDS.get(found.source, found.source)}",
        "dim",
    )
    fill_basis(page, basis)
    page.add_section("What fits at each size", FactTable(size_columns(found.dry_steps, what), found.tried))
    if written is not None and best.policies:
        reason = f"train under it, with the job's {what} set to {found.size}"
        page.add_next((f"memprof record --plan {shlex.quote(str(written))} {job}", reason))
    elif best.policies:
        page.add_next((again("--write", unused_file("plan", ".toml")), "keep the plan"))
    else:
        page.add_next((f"memprof report {shlex.quote(trace)}", "what fills it"))


def plan_columns(dry_steps: DrySteps = NO_DRY_STEPS) -> tuple[Column, ...]:
    """Returns the columns of the plan that fits a size."""
    return (
        Column("describe", None, TEXT, lambda one: one.plan.describe()),
        Column("peak_allocated_bytes", None, BYTES, attrgetter("peak_bytes")),
        Column("peak_phase", None),
        Column("step_time_us", None, US),
        Column("policies", None, rows_of(POLICIES), lambda one: policy_rows(one, dry_steps)),
    )


def size_columns(dry_steps: DrySteps = NO_DRY_STEPS, what: str = "size") -> tuple[Column, ...]:
    """Returns the columns of the sizes that were tried.

    Args:
        dry_steps: Steps of dry runs, from which the plans were predicted.
        what: ``batch`` or ``sequence``.
    """

    def described(at: AtSize) -> str:
        return "nothing fits" if at.best is None else _name(at.best)

    return (
        Column("size", what, NUMBER),
        Column("fits", None, TRUTH, lambda at: at.best is not None),
        shown("plan", NAMES, described),
        Column("least_peak_bytes", None, BYTES, attrgetter("least_bytes")),
        shown("peak", FIGURE, lambda at: format_bytes(at.least_bytes) if at.best is None else describe_peak(at.best)),
        shown("step time", US, lambda at: at.best and at.best.step_time_us),
        shown(f"per unit of {what}", US, lambda at: at.best and at.best.step_time_us / at.size),
        shown("peak in", TEXT, lambda at: at.best and place_of(at.best)),
        Column("plan", None, row_of(plan_columns(dry_steps)), attrgetter("best")),
    )


PLAN, SIZES = plan_columns(), size_columns()


def _json(
    found: Largest, best: Candidate | None, search_request: SearchRequest, what: str, estimated: str
) -> dict[str, Any]:
    return {
        "schema": PLAN_SCHEMA,
        "maximise": what,
        "budget_bytes": search_request.budget_bytes,
        "recorded_sizes": list(found.sizes),
        "how": found.source,
        "warnings": [estimated] if estimated else [],
        "largest": found.size or None,
        "is_complete": not found.was_stopped,
        "plan": None if best is None else record(plan_columns(found.dry_steps), best),
        "sizes": records(size_columns(found.dry_steps), found.tried),
    }


def _name(one: Candidate) -> str:
    return one.plan.describe() if one.policies else "as it is"
