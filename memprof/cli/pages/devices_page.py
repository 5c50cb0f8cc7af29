"""The page of `memprof devices`: how many devices a job needs, and the peak of each."""

from __future__ import annotations

import shlex
from operator import attrgetter
from pathlib import Path
from typing import Any

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.devices import Devices, OneRank
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.analysis.plans.predict import words_for_record
from memprof.analysis.table import BYTES, NUMBER, TEXT, US, Cell, Column, FactTable, Read, record, records, shown
from memprof.cli.page import Page
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_us, spell_bytes

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
