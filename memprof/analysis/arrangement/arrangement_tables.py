"""The tables of arrangements over devices: the fastest of them, and the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from memprof.analysis.arrangement.arrangements import Arrangements, Balance, Proposal
from memprof.analysis.plans.plan_json import PLAN_SCHEMA
from memprof.analysis.table import (
    BYTES,
    FIGURE,
    FRACTION,
    NUMBER,
    NUMBERS,
    SHARE,
    TEXT,
    TEXTS,
    US,
    Cell,
    Column,
    FactTable,
    Unit,
    record,
    records,
    rows_of,
    shown,
)
from memprof.planners.arrangement.pipeline import StagePeak
from memprof.planners.arrangement.search import Arranged
from memprof.units import format_bytes, format_us

_RATE = Unit("number", "{:,.4g}".format, is_number=True)
STAGES = (
    Column("peak_bytes", None, BYTES),
    Column("state_bytes", None, BYTES),
    Column("activation_bytes", None, BYTES),
    Column("held_micro_batches", None, NUMBER, attrgetter("held")),
    Column("where", None),
    Column("units", None, Unit("array", items="array"), meaning="layers, from the first to one past the last"),
)


def _arranged_columns(of: str = "") -> tuple[Column, ...]:
    """Returns the columns of arrangements as they are modelled, in JSON alone.

    Args:
        of: Where a row has its arrangement, ``arranged.`` or the row itself.
    """

    def column(key: str, unit: Unit, inside: str = "") -> Column:
        return Column(key, None, unit, attrgetter(f"{of}{inside}{key}"))

    degrees = ("data", "tensor", "pipeline", "context", "expert", "zero", "micro_batches", "samples")
    return (
        *(column(key, NUMBER, "arrangement.") for key in degrees),
        *(column(key, TEXT, "arrangement.") for key in ("schedule", "checkpointed", "offloaded")),
        column("split", NUMBERS, "arrangement."),
        column("peak_bytes", BYTES),
        *(column(f"{key}_us", US, "times.") for key in ("step", "compute", "communication", "bubble", "update")),
        column("samples_per_second", _RATE),
        column("stages", rows_of(STAGES)),
    )


ARRANGED = _arranged_columns()


def describe_details(one: Arranged) -> str:
    """Returns the micro-batches of an arrangement, and what it recomputes and offloads."""
    ways = one.arrangement
    return f"{ways.micro_batches} x {ways.samples} samples, {_saved(one) or 'nothing recomputed'}"


def _saved(one: Arranged) -> str:
    """Returns what is recomputed and offloaded; "" for neither."""
    ways = one.arrangement
    recomputed = "" if ways.checkpointed == "none" else f"checkpoint {ways.checkpointed}"
    offloaded = "" if ways.offloaded == "nothing" else f"offload {ways.offloaded}"
    return ", ".join(filter(None, (recomputed, offloaded)))


def _replayed(key: str) -> Any:
    return lambda one: None if one.plan is None else getattr(one.plan.prediction, key)


def _ways(one: Proposal) -> str:
    return f"{one.arranged.arrangement.micro_batches} x {one.arranged.arrangement.samples}"


def _communication(one: Proposal) -> float:
    return one.arranged.times.communication_us / one.arranged.times.step_us


def _bubble(one: Proposal) -> float | None:
    times = one.arranged.times
    return times.bubble_us / times.step_us if one.arranged.arrangement.pipeline > 1 else None


def proposal_columns(budget_bytes: int = 0) -> tuple[Column, ...]:
    """Returns the columns of proposals.

    Args:
        budget_bytes: What the peak of each rank is to be within.
    """

    def peak(one: Proposal) -> Cell:
        return Cell(format_bytes(one.peak_bytes), tone="good" if one.peak_bytes <= budget_bytes else "bad")

    return (
        *_arranged_columns("arranged."),
        shown("arrangement", TEXT, lambda one: one.arranged.arrangement.describe()),
        shown("micro-batches x samples", FIGURE, _ways),
        shown("schedule", TEXT, attrgetter("arranged.arrangement.schedule"), key="order", gives_way=1),
        shown("recompute, offload", TEXT, lambda one: _saved(one.arranged)),
        shown("peak", BYTES, peak),
        shown("step", US, attrgetter("step_us")),
        shown("samples/s", _RATE, attrgetter("samples_per_second"), gives_way=2),
        shown("comm", FRACTION, _communication, gives_way=4),
        shown("bubble", FRACTION, _bubble, gives_way=5),
        Column("source", "source", gives_way=3),
        Column("replayed_peak_bytes", None, BYTES, _replayed("peak_allocated_bytes")),
        Column("replayed_step_us", None, US, _replayed("step_time_us")),
        Column("not_applied", None, TEXT, attrgetter("why_not")),
        Column("torch", None, TEXTS, attrgetter("calls")),
    )


PROPOSALS = proposal_columns()


def proposals(found: Arrangements) -> FactTable:
    """Returns the fastest arrangements."""
    return FactTable(proposal_columns(found.question.budget_bytes), found.proposals)


def stages(balance: Balance, names: Sequence[str]) -> FactTable:
    """Returns the peak of each stage of a pipeline, under each of several splits of the layers.

    Args:
        balance: The splits.
        names: The layers, between what runs before and after them.
    """

    def layers(split: str) -> Any:
        return lambda row: _layers(row[split], names)

    def figure(split: str, key: str) -> Any:
        return lambda row: getattr(row[split], key)

    columns = (
        shown("stage", NUMBER, lambda row: row["stage"]),
        shown("layers", TEXT, layers("chosen")),
        shown("micro-batches held", NUMBER, figure("chosen", "held")),
        shown("state", BYTES, figure("chosen", "state_bytes")),
        shown("peak", BYTES, figure("chosen", "peak_bytes")),
        shown("equal layers", BYTES, figure("equal", "peak_bytes")),
        shown("levelled", BYTES, figure("levelled", "peak_bytes")),
        shown("levelled layers", TEXT, layers("levelled")),
        shown("", SHARE, lambda row: Cell("", bar=row["chosen"].peak_bytes), key="bar", is_bar=True),
    )
    splits = {"chosen": balance.chosen, "equal": balance.equal, "levelled": balance.levelled}
    rows = [
        {"stage": number} | {name: one.stages[number] for name, one in splits.items()}
        for number in range(len(balance.chosen.stages))
    ]
    return FactTable(columns, rows, max(one.peak_bytes for one in splits.values()))


def _layers(stage: StagePeak, names: Sequence[str]) -> str:
    """Names the layers of a stage: ``0 to 7``, and whether it has what runs before or after all layers."""
    first, end = stage.units[0]
    low, high = max(first, 1), min(end, len(names) - 1)
    words = f"{low - 1} to {high - 2}" if high - low > 1 else f"{low - 1}"
    return ("before, " if first == 0 else "") + words + (", after" if end == len(names) else "")


def describe_splits(balance: Balance) -> str:
    """Returns the peak and the step time under each split."""
    chosen, equal, levelled = (
        f"{format_bytes(one.peak_bytes)} at {format_us(one.times.step_us)}"
        for one in (balance.chosen, balance.equal, balance.levelled)
    )
    ways = balance.chosen.arrangement
    return (
        f"{ways.describe()}, {ways.schedule}, {describe_details(balance.chosen)}; worst {chosen}; with equal layers "
        f"{equal}; levelled {levelled}"
    )


def arrangements_to_json(found: Arrangements) -> dict[str, Any]:
    """Returns everything that the page shows, in bytes and microseconds."""
    question, balance, nearest = found.question, found.balance, found.search.nearest
    return {
        "schema": PLAN_SCHEMA,
        "devices": question.cluster.devices,
        "budget_bytes": question.budget_bytes,
        "global_samples": question.samples,
        "tried": found.search.tried,
        "was_stopped": found.search.was_stopped,
        "arrangements": records(PROPOSALS, found.proposals),
        "nearest": None if nearest is None else record(ARRANGED, nearest),
        "balance": balance and {name: record(ARRANGED, one) for name, one in vars(balance).items()},
        "assumptions": list(found.assumptions),
    }
