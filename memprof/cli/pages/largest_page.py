"""The page of `memprof largest`: the largest batch, or the longest sequence, that fits."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.plan_json import PLAN_SCHEMA, policy_to_json
from memprof.analysis.plans.suggest import describe_peak, place_of
from memprof.cli.page import Page, cell, make_table
from memprof.cli.pages.plan_page import fill_basis
from memprof.cli.progress import SearchBar
from memprof.errors import GateFailedError, PolicyError
from memprof.planners.scaling.base import SizedStep
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.largest import Largest, find_largest, sized_step
from memprof.planners.search.request import MakeSearchRequest, SearchRequest
from memprof.policies.base import Policy
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.plan.plan_tables import SOURCES_IN_WORDS
from memprof.policies.plan.several_steps import DrySteps, frame_of, sources_of
from memprof.replay.live import live_bytes
from memprof.units import format_bytes, format_us, printable

#: Most sets of policies that the job is dry-run under.
_MOST_FRAMES = 6


def show_largest(
    bases: list[Basis],
    trace: str,
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
    if is_json:
        told = _json(found, best, request, what, estimated)
        print(json.dumps(told, indent=2, allow_nan=False))
    else:
        page = Page.for_stdout()
        _fill(page, found, best, request, what, bases[0], trace, written, estimated)
        page.write()
    return 0 if best is not None else GateFailedError.exit_code


def _fill(
    page: Page,
    found: Largest,
    best: Candidate | None,
    search_request: SearchRequest,
    what: str,
    basis: Basis,
    trace: str,
    written: Path | None,
    estimated: str,
) -> None:
    noun = {"batch": "Largest batch", "sequence": "Longest sequence"}[what]
    budget = format_bytes(search_request.budget_bytes)
    if best is None:
        least = min(found.tried, key=lambda one: one.least_bytes)
        page.add(
            Text(
                f"No {what} fits {budget}: at {least.size} the lowest peak is {format_bytes(least.least_bytes)}.",
                "bold",
            )
        )
        return
    plan = best.plan.describe() if best.policies else "the job as it is"
    page.add(
        Text(
            printable(
                f"{noun} within {budget}: {found.size}, with {plan}; peak {describe_peak(best)}, step "
                f"{format_us(best.step_time_us)}."
            ),
            style="bold",
        )
    )
    if estimated:
        page.add(Text(f"warning: {printable(estimated)}", style="yellow"))
    if found.was_stopped:
        page.add(Text("warning: the search was stopped early; a larger one may fit.", style="yellow"))
    if found.size > 4 * max(found.sizes):
        page.add(
            Text(
                f"warning: {found.size} is far from what was recorded ({', '.join(map(str, found.sizes))}); record "
                "the job closer to it, and add that recording with --also.",
                style="yellow",
            )
        )
    page.add(
        Text(
            f"recorded at {', '.join(map(str, found.sizes))}; steps of other sizes are "
            f"{SOURCES_IN_WORDS.get(found.source, found.source)}",
            style="dim",
        )
    )
    fill_basis(page, basis)
    page.add_section("What fits at each size", _table(found, what))
    page.add("")
    if written is not None and best.policies:
        command = f"memprof record --plan {shlex.quote(str(written))}"
        page.add(Text.assemble(("next: ", "dim"), command, (f" and the job's own {what} of {found.size}", "dim")))
    elif best.policies:
        page.add(Text.assemble(("next: ", "dim"), "the same with --write plan.toml", ("  keep the plan", "dim")))
    else:
        command = f"memprof report {shlex.quote(trace)}"
        page.add(Text.assemble(("next: ", "dim"), command, ("  what fills it", "dim")))


def _table(found: Largest, what: str) -> Table:
    table = make_table(f">{what}", "plan", ">peak", ">step time", f">per unit of {what}", "peak in")
    for one in found.tried:
        best = one.best
        if best is None:
            table.add_row(str(one.size), "nothing fits", format_bytes(one.least_bytes), "", "", "")
        else:
            table.add_row(
                str(one.size),
                Text(printable(best.plan.describe() if best.policies else "as it is")),
                describe_peak(best),
                format_us(best.step_time_us),
                format_us(best.step_time_us / one.size),
                cell(place_of(best)),
            )
    return table


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
        "plan": None if best is None else _plan(best, found.dry_steps),
        "sizes": [
            {
                "size": one.size,
                "fits": one.best is not None,
                "least_peak_bytes": one.least_bytes,
                "plan": None if one.best is None else _plan(one.best, found.dry_steps),
            }
            for one in found.tried
        ],
    }


def _plan(one: Candidate, dry_steps: DrySteps) -> dict[str, Any]:
    return {
        "describe": one.plan.describe(),
        "peak_allocated_bytes": one.peak_bytes,
        "peak_phase": one.peak_phase,
        "step_time_us": one.step_time_us,
        "policies": list(map(policy_to_json, one.policies, one.words, sources_of(one.policies, dry_steps))),
    }
