"""The pages on several devices: of `memprof devices`, and of `memprof suggest --devices` (the fastest arrangements)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

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
from memprof.analysis.plans.basis import Basis, basis_of, link_of
from memprof.analysis.plans.devices import Devices, OneRank
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.analysis.plans.predict import words_for_record
from memprof.analysis.table import BYTES, NUMBER, TEXT, US, Cell, Column, FactTable, Read, record, records, shown
from memprof.cli.options.suggest_options import SuggestOptions
from memprof.cli.page import Page, show
from memprof.cli.pages.next_commands import again
from memprof.errors import GateFailedError
from memprof.machines.catalogue import find_machine, machine_of_device
from memprof.planners.search.request import MakeSearchRequest
from memprof.policies.plan.plan_file import write_plan
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_percent, format_us, spell_bytes

_STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def fill_devices(page: Page, found: Devices, basis: Basis, trace: Trace, written: Path | None) -> None:
    """Adds how many devices are needed, and one rank's peak on each number of them."""
    page.warn(*basis.warnings)
    page.say(_verdict(found))
    alone = f"and its step, with the recorded batch on every rank; alone {format_us(found.alone_us)}"
    page.add_section("One rank's peak", _table(found), alone)
    for sentence in found.refused:
        page.say(sentence, "dim")
    if not found.fits_alone:
        page.add_next(_next(found, trace, written))


def _verdict(found: Devices) -> str:
    budget = format_bytes(found.budget_bytes)
    if found.fits_alone:
        return f"One device suffices: the job needs {format_bytes(found.alone_bytes)} of {budget}."
    if found.communicator_bytes:
        budget += f" ({format_bytes(found.communicator_bytes)} of it left free for NCCL)"
    needed = found.needed
    if needed is None:
        least = min(found.ranks, key=lambda each: each.peak_allocated_bytes, default=None)
        nearest = f": {_title(least)} still holds {format_bytes(least.peak_allocated_bytes)}" if least else ""
        return f"No number of devices suffices{nearest}, over the budget of {budget}. Activations are not sharded."
    held, alone = format_bytes(needed.peak_allocated_bytes), format_bytes(found.alone_bytes)
    return (
        f"{needed.policy.world_size} devices are needed: {_title(needed)} holds {held} of {budget} on each; on one "
        f"device it is {alone}."
    )


def _title(rank: OneRank) -> str:
    return f"{_STRATEGIES[rank.policy.stage]} over {rank.policy.world_size}"


#: One rank of many.
RANKS = (
    Column("world_size", None, NUMBER, attrgetter("policy.world_size")),
    Column("stage", None, NUMBER, attrgetter("policy.stage")),
    Column("strategy", None, TEXT, lambda rank: _STRATEGIES[rank.policy.stage]),
    Column("peak_allocated_bytes", None, BYTES),
    Column("step_time_us", None, US),
    Column("exposed_us", None, US, meaning="step time added by communication"),
)


def _table(found: Devices) -> FactTable:
    """Returns a row for each number of devices, with the peak and the step time under each strategy."""
    ranks = {(rank.policy.world_size, rank.policy.stage): rank for rank in found.ranks}

    def peak(stage: int) -> Read:
        def read(size: int) -> Cell | None:
            rank = ranks.get((size, stage))
            tone = "good" if rank is not None and found.fits(rank) else ""
            return None if rank is None else Cell(format_bytes(rank.peak_allocated_bytes), tone=tone)

        return read

    def time_us(stage: int) -> Read:
        return lambda size: None if (rank := ranks.get((size, stage))) is None else rank.step_time_us

    columns = (
        shown("devices", NUMBER, int),
        *(shown(name, BYTES, peak(stage), missing="-") for stage, name in enumerate(_STRATEGIES)),
        *(shown(f"{name} step", US, time_us(stage), missing="-") for stage, name in enumerate(_STRATEGIES)),
    )
    return FactTable(columns, dict.fromkeys(size for size, _ in ranks))


def _next(found: Devices, trace: Trace, written: Path | None) -> tuple[str, str]:
    job = words_for_record(trace.manifest)
    if found.needed is None:
        command = f"memprof suggest {shlex.quote(str(trace.path))} --budget {spell_bytes(found.budget_bytes)}"
        return command, "checkpointing shrinks activations"
    if written is not None:
        return f"memprof record --plan {shlex.quote(str(written))} {job}", ""
    policy = found.needed.policy
    return f"memprof record --shard {_STRATEGIES[policy.stage]} --world-size {policy.world_size} {job}", ""


def devices_to_json(found: Devices) -> dict[str, Any]:
    """Returns what ``--json`` prints."""
    return {
        "schema": PLAN_SCHEMA,
        "budget_bytes": found.budget_bytes,
        "peak_allocated_bytes": found.alone_bytes,
        "step_time_us": found.alone_us,
        "needed": None if found.needed is None or found.fits_alone else record(RANKS, found.needed),
        "fits_alone": found.fits_alone,
        "ranks": records(RANKS, found.ranks),
        "refused": list(found.refused),
    }


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
    page.say(_describe_fastest(found, device))
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


def _describe_fastest(found: Arrangements, device: str) -> str:
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
