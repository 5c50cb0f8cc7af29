"""Summarises a rank in a few small tables, so that many ranks can be compared without reading their own tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from memprof.phases import in_order
from memprof.trace.cut import StepCuts
from memprof.trace.fullest import find_fullest_step
from memprof.trace.manifest import Manifest
from memprof.trace.operator_facts import READS_NUMBER, are_among
from memprof.trace.schema import (
    NONE,
    RANK_TABLES,
    Bools,
    Floats,
    Ints,
    Ops,
    RankCollectives,
    RankCurve,
    RankMoments,
    RankParts,
    Ranks,
    Steps,
    Storages,
    Table,
)
from memprof.trace.step import Step

T = TypeVar("T", bound=Table)
Tables = Mapping[type[Table], Table]

#: Number of stretches that a rank's fullest step is cut into.
STRETCHES = 256
#: Waits for a collective that was started earlier.
_WAITS = "_c10d_functional.wait_tensor.default"


class RankSource(Protocol):
    """A reader of one rank's tables."""

    def read(self, kind: type[T], /) -> T:
        """Reads one table; a missing table has no rows."""
        ...


def summarise_rank(manifest: Manifest, rank: RankSource) -> dict[type[Table], Table]:
    """Summarises a rank.

    Returns:
        Its rows of every table of ``RANK_TABLES``.
    """
    source = _Kept(manifest, rank)
    steps, ops = source.table(Steps), source.table(Ops)
    number = find_fullest_step(steps, ops, source.table(Storages))
    step = None if number is None else StepCuts(source).cut(number)
    highest = np.empty(0, dtype=np.int64) if step is None else _highest(step)
    return {
        Ranks: _rank(manifest, steps, ops, step, highest),
        RankMoments: RankMoments.empty() if step is None else _moments(manifest.rank, step, highest),
        RankParts: RankParts.empty() if step is None else _parts(manifest.rank, step, int(np.argmax(highest))),
        RankCollectives: _collectives(manifest, steps, ops),
        RankCurve: _curve(manifest.rank, highest),
    }


class _Kept:
    """The tables as ``StepCuts`` requests them, each read once."""

    def __init__(self, manifest: Manifest, rank: RankSource) -> None:
        self.manifest = manifest
        self._rank = rank
        self._tables: dict[type[Table], Table] = {}

    def table(self, kind: type[T], /) -> T:
        if kind not in self._tables:
            self._tables[kind] = self._rank.read(kind)
        return cast(T, self._tables[kind])


def join_summaries(summaries: Iterable[Tables]) -> dict[type[Table], Table]:
    """Joins the summaries of several ranks, in the order given."""
    kept = list(summaries)
    return {kind: kind.joined([summary[kind] for summary in kept if kind in summary]) for kind in RANK_TABLES}


def _highest(step: Step) -> Ints:
    """Returns the allocator's peak during each operator, by replaying allocations and frees."""
    born, freed = np.cumsum(step.born_bytes()), np.cumsum(step.freed_bytes())
    before_freed = freed - step.freed_bytes()
    highest: Ints = step.bytes_at_start() + born - before_freed + step.ops.workspace_bytes
    return highest


def _rank(manifest: Manifest, steps: Steps, ops: Ops, step: Step | None, highest: Ints) -> Ranks:
    capture = manifest.capture
    ends = f"{capture.ends_at} ({capture.reason})" if capture.ends_at and capture.reason else capture.reason
    moments = [ops.start_us[-1:], (steps.start_us + steps.duration_us)[-1:]]
    reserved = NONE if step is None else int(step.memory.reserved_bytes.max(initial=NONE))
    return Ranks.of(
        rank=[manifest.rank],
        node=[manifest.node],
        clock=[manifest.clock],
        device=[_fullest_device(step) if step is not None else manifest.machine.device_kind],
        step=[NONE if step is None else step.number],
        ops=[len(highest)],
        step_time_us=[np.nan if step is None else step.duration_us],
        peak_bytes=[int(highest.max(initial=NONE))],
        reserved_bytes=[reserved],
        is_complete=[capture.is_complete],
        ends_at=["" if capture.is_complete else ends],
        last_step=[int(steps.step.max(initial=NONE))],
        last_us=[float(np.concatenate(moments).max(initial=-np.inf)) if len(steps) or len(ops) else np.nan],
    )


def _fullest_device(step: Step) -> str:
    devices, places = np.unique(step.storages.device, return_inverse=True)
    if not len(devices):
        return ""
    sizes = np.zeros(len(devices), dtype=np.int64)
    np.add.at(sizes, places, step.storages.allocated_bytes)
    return str(devices[int(np.argmax(sizes))])


def _moments(rank: int, step: Step, highest: Ints) -> RankMoments:
    ops = step.ops
    found = [("", int(np.argmax(highest)))]
    for phase in in_order(ops.phase.tolist()):
        rows = np.flatnonzero(ops.phase == phase)
        found.append((phase, int(rows[np.argmax(highest[rows])])))
    at = np.array([op for _, op in found])
    return RankMoments.of(
        rank=[rank] * len(found),
        phase=[phase for phase, _ in found],
        op_id=at,
        name=ops.name[at],
        module=_module_names(step, ops.module_id[at]),
        in_phase=ops.phase[at],
        allocated_bytes=highest[at],
    )


def _parts(rank: int, step: Step, op_id: int) -> RankParts:
    storages = step.storages
    is_alive = (storages.created_op_id <= op_id) & ((storages.freed_op_id == NONE) | (storages.freed_op_id >= op_id))
    alive = storages.take(is_alive)
    workspace = int(step.ops.workspace_bytes[op_id])
    sizes = np.append(alive.allocated_bytes, workspace)
    modules = _module_names(step, np.append(alive.module_id, step.ops.module_id[op_id]))
    rows: list[tuple[str, str, int]] = []
    splits = {"category": np.append(alive.category, "workspace"), "module": modules}
    for kind, names in splits.items():
        sums: dict[str, int] = {}
        for name, size in zip(names.tolist(), sizes.tolist(), strict=True):
            sums[name] = sums.get(name, 0) + size
        rows += [(kind, name, size) for name, size in sorted(sums.items(), key=lambda one: (-one[1], one[0])) if size]
    kinds, names, kept = zip(*rows, strict=True) if rows else ((), (), ())
    return RankParts.of(rank=[rank] * len(rows), kind=list(kinds), name=list(names), allocated_bytes=list(kept))


def _module_names(step: Step, module_ids: Ints) -> Any:
    """Returns the qualified name of each module; the type for a model itself, which has no name."""
    titles = np.where(step.modules.name == "", step.modules.type, step.modules.name)
    return np.append(titles, "")[module_ids].astype(object)


def _collectives(manifest: Manifest, steps: Steps, ops: Ops) -> RankCollectives:
    recorded = steps.step[(steps.kind == "recorded") & (steps.first_op_id != NONE)]
    rows = np.flatnonzero((ops.kind == "collective") & np.isin(ops.step, recorded) & (ops.name != _WAITS))
    places = np.zeros(len(rows), dtype=np.int64)
    for number in recorded.tolist():
        inside = ops.step[rows] == number
        places[inside] = np.arange(int(inside.sum()))
    return RankCollectives.of(
        rank=[manifest.rank] * len(rows),
        step=ops.step[rows],
        place=places,
        name=ops.name[rows],
        phase=ops.phase[rows],
        read_bytes=ops.read_bytes[rows],
        start_us=ops.start_us[rows],
        over_us=_over_us(manifest, ops, rows),
    )


def _over_us(manifest: Manifest, ops: Ops, rows: Ints) -> Floats:
    """Returns a time by which each collective had certainly finished; NaN where unknown.

    The operator that launches a collective does not show its end: it may run asynchronously and be waited for later. On
    CPU, the first operator of the update needs all earlier communication. A device runs asynchronously and synchronizes
    with Python where a value is read back; the operator after that started once the device was done.
    """
    if manifest.machine.device_kind == "cpu":
        after = np.flatnonzero(_starts_of(ops.phase == "optimizer"))
    else:
        after = np.flatnonzero(are_among(ops.name, READS_NUMBER)) + 1
        after = after[after < len(ops)]
    places = np.searchsorted(after, rows, side="right")
    found = np.append(after, NONE)[places]
    over: Floats = np.where(found == NONE, np.nan, np.append(ops.start_us, np.nan)[found])
    return over


def _starts_of(holds: Bools) -> Bools:
    starts: Bools = holds & ~np.append(False, holds[:-1])
    return starts


def _curve(rank: int, highest: Ints) -> RankCurve:
    count = min(STRETCHES, len(highest))
    if not count:
        return RankCurve.empty()
    starts = (np.arange(count) * len(highest)) // count
    return RankCurve.of(
        rank=[rank] * count, place=np.arange(count), allocated_bytes=np.maximum.reduceat(highest, starts)
    )
