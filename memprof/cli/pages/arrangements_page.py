"""`memprof suggest --devices`: the fastest arrangements of a job over several devices, and the stages of a pipeline."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from memprof.analysis.allocator.uncertainty import room_of
from memprof.analysis.arrangement.arrangement_tables import (
    arrangements_to_json,
    describe_details,
    describe_splits,
    proposals,
    stages,
)
from memprof.analysis.arrangement.arrangements import Arrangements, find_cluster, find_proposals
from memprof.analysis.plans.another_plan import unused_file
from memprof.analysis.plans.basis import basis_of, link_of
from memprof.analysis.plans.predict import words_for_record
from memprof.cli.options.suggest_options import SuggestOptions
from memprof.cli.page import Page, show
from memprof.cli.pages.next_commands import again
from memprof.errors import GateFailedError
from memprof.machines.catalogue import find_machine, machine_of_device
from memprof.planners.search.request import MakeSearchRequest
from memprof.policies.plan.plan_file import write_plan
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_percent, format_us


def suggest_arrangements(opened: Trace, make_request: MakeSearchRequest, given: SuggestOptions) -> int:
    """Searches for arrangements, writes the plan of the fastest that memprof applies, and prints the page.

    Returns:
        The exit code: 4 if no arrangement fits.
    """
    cluster_request, step_number, written = given.cluster, given.step_number, given.written
    assert cluster_request is not None  # --devices is given
    machine = find_machine(name) if (name := given.search_flags["machine"]) else None
    basis = given.size.basis(basis_of(opened, step_number, machine), opened, machine, step_number)
    room, link = room_of(opened, cluster_request.devices), link_of(opened, machine)
    search_request = make_request(basis.peak_bytes, room, link_bytes_per_us=link)
    device = machine or machine_of_device(opened.manifest.machine.device_name)
    cluster = find_cluster(cluster_request, device, search_request.link_bytes_per_us, basis.step)
    deadline = time.monotonic() + search_request.time_limit_s
    found = find_proposals(
        basis, cluster, search_request.budget_bytes, cluster_request, deadline=deadline, trace=str(opened.path)
    )
    if written is not None and found.applicable is not None and found.applicable.plan is not None:
        write_plan(written, found.applicable.plan)
    name = device.name if device is not None else ""
    show(
        lambda page: _fill(page, found, basis.warnings, name, words_for_record(opened.manifest), written),
        lambda: arrangements_to_json(found),
        is_json=given.is_json,
    )
    return 0 if found.best is not None else GateFailedError.exit_code


def _fill(
    page: Page, found: Arrangements, warnings: Sequence[str], device: str, job: str, written: Path | None
) -> None:
    page.warn(*warnings)
    page.say(_verdict(found, device))
    if found.proposals:
        samples = f"{found.question.samples:,} samples an update"
        page.add_section("Arrangements", proposals(found), f"the fastest of each kind; worst rank's peak; {samples}")
        _add_calls(page, found)
    if found.balance is not None:
        page.add_section(
            "Peak of each stage", stages(found.balance, found.question.costs.names), describe_splits(found.balance)
        )
    page.add("")
    for sentence in found.assumptions:
        page.say(f"assumed: {sentence}", "dim")
    if found.best is None:
        page.say("It takes more devices, a smaller --global-batch, or a recording with a smaller batch.")
    elif found.applicable is None:
        page.say("No arrangement shown is one that memprof applies itself; the torch calls above carry it out.")
    elif written is not None:
        page.add_next((f"memprof record --plan {shlex.quote(str(written))} {job}", "train under it"))
    else:
        page.add_next((again("--write", unused_file("plan", ".toml")), "keep the plan"))


def _verdict(found: Arrangements, device: str) -> str:
    question = found.question
    where = f"{question.cluster.devices} devices" + (f" ({device})" if device else "")
    budget = format_bytes(question.budget_bytes)
    stopped = " (search stopped at its time limit)" if found.search.was_stopped else ""
    best = found.best
    if best is None:
        nearest = found.search.nearest
        if nearest is None:
            return f"No arrangement over {where} is possible with {question.samples:,} samples an update{stopped}."
        return (
            f"No arrangement over {where} fits {budget}: {nearest.arrangement.describe()}, "
            f"{describe_details(nearest)}, still holds {format_bytes(nearest.peak_bytes)} on its worst rank{stopped}."
        )
    one = best.arranged
    return (
        f"{where}: {one.arrangement.describe()} is fastest, {format_us(best.step_us)} a step and "
        f"{best.samples_per_second:,.4g} samples/s; its worst rank holds {format_bytes(best.peak_bytes)} of {budget} "
        f"({best.source}){stopped}."
    )


def _add_calls(page: Page, found: Arrangements) -> None:
    """Adds what carries out the fastest arrangement, and what memprof applies instead where it is not that one."""
    best, applied = found.best, found.applicable
    if best is None:
        return
    if best.plan is None:
        page.add("")
        page.say(f"memprof does not apply {best.arranged.arrangement.describe()}: {best.why_not}. In torch:")
        for call in best.calls:
            page.say(f"  {call}")
    if applied is not None and applied is not best:
        one = applied.arranged
        slower = applied.step_us / best.step_us - 1
        page.say(
            f"memprof applies {one.arrangement.describe()}, {describe_details(one)}: {format_percent(slower)} slower, "
            f"{format_bytes(applied.peak_bytes)} on its worst rank (replayed)."
        )
