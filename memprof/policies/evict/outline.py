"""A step as eviction sees it: operators, the storages they make and read, and which can be dropped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memprof.policies.rewrite.stack_marks import is_in_transform
from memprof.replay.directed import cycle_of
from memprof.replay.live import live_bytes
from memprof.replay.time import op_cost_us
from memprof.trace.schema import NONE, Bools, Floats, Ints
from memprof.trace.step import Step, sum_at

_LASTING = ("parameter", "buffer", "gradient", "optimizer_state", "input")


@dataclass(frozen=True, eq=False)
class Outline:
    """What victims are planned from, read from a recorded step or observed by the runtime. Storages are numbered.

    Attributes:
        size_bytes: Size of each storage.
        may_go: Whether each may be evicted: autograd keeps it, and repeatable operators computed it.
        can_recompute: Whether repeatable operators computed it, kept or not.
        created: Operator that allocates each.
        freed: Operator after which each is freed; the number of operators where none is.
        free_from: First operator at which only autograd holds a storage, by storage that may go.
        makers: Operators that write each storage.
        sources: Other storages that those operators read.
        cost_us: Time of each operator when recomputed.
        workspace_bytes: Bytes that each operator takes in addition to its results.
        floor_bytes: Bytes of everything that may not go during each operator, workspace included.
        floor_after_bytes: The same after each operator.
        reads: Storages that may go and that each operator needs: recomputed before it runs.
        what: Name of each operator in error messages.
    """

    size_bytes: list[int]
    may_go: list[bool]
    can_recompute: list[bool]
    created: list[int]
    freed: list[int]
    free_from: dict[int, int]
    makers: dict[int, list[int]]
    sources: dict[int, list[int]]
    cost_us: list[float]
    workspace_bytes: list[int]
    floor_bytes: list[int]
    floor_after_bytes: list[int]
    reads: list[list[int]]
    what: list[str]

    def recompute_us(self, storage: int) -> float:
        """Returns the time to recompute a storage."""
        return sum(self.cost_us[op] for op in self.makers[storage])

    @cached_property
    def start_us(self) -> list[float]:
        """When each operator starts, on a clock of first runs."""
        clock, starts = 0.0, []
        for cost_us in self.cost_us:
            starts.append(clock)
            clock += cost_us
        return starts

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Operators that need each storage once only autograd holds it, in order."""
        found: dict[int, list[int]] = {}
        for op, storages in enumerate(self.reads):
            for storage in storages:
                if op >= self.free_from[storage]:
                    found.setdefault(storage, []).append(op)
        return found

    @cached_property
    def dependants(self) -> dict[int, list[int]]:
        """Storages computed from each storage."""
        found: dict[int, list[int]] = {}
        for storage, sources in self.sources.items():
            for source in sources:
                found.setdefault(source, []).append(storage)
        return found

    @cached_property
    def known_until(self) -> list[int]:
        """Operator up to which each storage can be computed: by then it and all computed from it have been freed."""
        until = list(self.freed)
        for storage in sorted(self.makers, key=lambda made: self.makers[made][-1], reverse=True):
            for source in self.sources[storage]:
                until[source] = max(until[source], until[storage])
        return until

    @cached_property
    def made_together(self) -> dict[int, list[int]]:
        """Results of each operator that are never changed afterwards."""
        found: dict[int, list[int]] = {}
        for storage, made_by in self.makers.items():
            if len(made_by) == 1 and self.can_recompute[storage]:
                found.setdefault(made_by[0], []).append(storage)
        return found

    @cached_property
    def events(self) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Storages that may go, by the operator that allocates them, that frees them, and by ``free_from``."""
        total = len(self.cost_us)
        born: list[list[int]] = [[] for _ in range(total)]
        dies: list[list[int]] = [[] for _ in range(total + 1)]
        offered: list[list[int]] = [[] for _ in range(total + 1)]
        for storage, may_go in enumerate(self.may_go):
            if may_go:
                born[self.created[storage]].append(storage)
                dies[self.freed[storage]].append(storage)
                offered[self.free_from[storage]].append(storage)
        return born, dies, offered


def outline_of(step: Step, units: Units) -> Outline:
    """Returns the outline of a recorded step."""
    ops, storages, total = step.ops, step.storages, len(step.ops)
    chosen = np.flatnonzero(units.may_go)
    created, freed = storages.created_op_id[chosen], storages.freed_op_id[chosen]
    gone = sum_at(freed, storages.allocated_bytes[chosen], total)
    after = np.cumsum(sum_at(created, storages.allocated_bytes[chosen], total) - gone)
    live = live_bytes(step)
    uses = step.uses
    # Forward reads what is there anyway; backward needs what it reads.
    is_needed = units.may_go[uses.storage_id] & (storages.created_op_id[uses.storage_id] < uses.op_id)
    is_needed &= (ops.phase == "backward")[uses.op_id] | (uses.op_id <= units.held[uses.storage_id])
    reads: list[list[int]] = [[] for _ in range(total)]
    for op_id, storage in zip(uses.op_id[is_needed].tolist(), uses.storage_id[is_needed].tolist(), strict=True):
        reads[op_id].append(storage)
    return Outline(
        size_bytes=storages.allocated_bytes.tolist(),
        may_go=units.may_go.tolist(),
        can_recompute=units.can_recompute.tolist(),
        created=storages.created_op_id.tolist(),
        freed=np.where(storages.freed_op_id == NONE, total, storages.freed_op_id).tolist(),
        free_from={storage: int(units.held[storage]) + 1 for storage in chosen.tolist()},
        makers=units.makers,
        sources=units.sources,
        cost_us=units.cost_us.tolist(),
        workspace_bytes=ops.workspace_bytes.tolist(),
        floor_bytes=(live.during - (after + gone)).tolist(),
        floor_after_bytes=(live.after - after).tolist(),
        reads=reads,
        what=[_what(str(name), str(phase)) for name, phase in zip(ops.name, ops.phase, strict=True)],
    )


def _what(name: str, phase: str) -> str:
    """Names an operator in a message: torch's marks of a profiler's ranges stand for the job at that moment."""
    where = "outside of forward and backward" if phase == "other" else f"in {phase}"
    return f"{'the job' if name.startswith('profiler.') else name} {where}"


@dataclass(frozen=True, eq=False)
class Units:
    """The storages of a step as the runtime treats them. Columns are of shape ``(storages,)``, except cost.

    A storage is recomputed by all operators that wrote it in forward, in order, which need their inputs.

    Attributes:
        may_go: Whether it may be dropped: autograd keeps it, and repeatable operators computed it.
        can_recompute: Whether repeatable operators computed it, kept or not.
        held: Last operator up to which something besides backward nodes holds it.
        makers: Operators that write each storage.
        sources: Other storages that those operators read.
        cost_us: Time of each operator when recomputed, shape ``(ops,)``.
    """

    may_go: Bools
    can_recompute: Bools
    held: Ints
    makers: dict[int, list[int]]
    sources: dict[int, list[int]]
    cost_us: Floats


def units_of(step: Step) -> Units:
    """Reads the units from a step."""
    ops, storages, uses = step.ops, step.storages, step.uses
    created, freed = storages.created_op_id, storages.freed_op_id
    total = len(ops)
    is_forward = (ops.phase == "forward") & ~ops.is_recompute & (ops.kind == "compute")
    is_own = (created != NONE) & ~np.isin(storages.category, _LASTING) & (storages.allocated_bytes > 0)
    is_own[is_own] = is_forward[created[is_own]]
    # Storages that backward writes cannot be recomputed.
    writes = uses.role != "read"
    late = writes & ~is_forward[uses.op_id]
    is_own[uses.storage_id[late]] = False

    makers: dict[int, list[int]] = {}
    reads: dict[int, list[int]] = {}
    for op_id, storage, role in zip(uses.op_id.tolist(), uses.storage_id.tolist(), uses.role.tolist(), strict=True):
        if role == "read":
            reads.setdefault(op_id, []).append(storage)
        elif is_own[storage]:
            makers.setdefault(storage, []).append(op_id)
    for storage in np.flatnonzero(is_own).tolist():
        first = int(created[storage])
        if first not in makers.setdefault(storage, []):
            makers[storage].insert(0, first)
    sources = {
        storage: list(dict.fromkeys(s for op_id in made_by for s in reads.get(op_id, ()) if s != storage))
        for storage, made_by in makers.items()
    }

    is_own &= ~cannot_be_remade(sources, np.where(freed == NONE, total, freed))

    last = _last_of_nodes(step)
    saved = step.saved
    by_node = last[saved.forward_op_id] != NONE
    kept_until = np.full(len(storages), NONE, dtype=np.int64)
    np.maximum.at(kept_until, saved.storage_id[by_node], last[saved.forward_op_id[by_node]])
    held = _held(step)
    # If it is freed after the last node releases it, something else holds it all along.
    lives = np.where(freed == NONE, total, freed)
    held = np.where(lives > kept_until, lives, held)
    # Torch shows the runtime nothing that is saved there, nor what hooks of the job take.
    is_unseen = (is_in_transform(step) | step.ops.is_hooked)[saved.forward_op_id]
    held[saved.storage_id[is_unseen]] = lives[saved.storage_id[is_unseen]]
    return Units(is_own & (kept_until != NONE) & (held < lives), is_own, held, makers, sources, op_cost_us(step))


def cannot_be_remade(sources: dict[int, list[int]], lives: Ints) -> Bools:
    """Returns which storages depend on contents that no longer exist, ``(storages,)``.

    An example is a table filled from itself, row by row, and the storages in between: its earlier contents are gone.
    Storages computed from such a table that outlive it also qualify.

    Args:
        sources: Storages that each storage is computed from.
        lives: Operators after which the storages are freed, ``(storages,)``.
    """
    pairs = [(storage, source) for storage, needed in sources.items() for source in needed]
    storages, needed = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    label = cycle_of(storages, needed, len(lives))
    is_lost: Bools = np.bincount(label, minlength=1)[label] > 1
    is_outlived = lives[needed] < lives[storages]
    while True:
        dependants = storages[is_outlived & is_lost[needed] & ~is_lost[storages]]
        if not len(dependants):
            return is_lost
        is_lost[dependants] = True


def _last_of_nodes(step: Step) -> Ints:
    """Returns the last operator of each forward operator's backward node, NONE where it has none."""
    ops = step.ops
    rows = np.flatnonzero((ops.forward_op_id != NONE) & ~ops.is_recompute & (ops.phase == "backward"))
    last = np.full(len(ops) + 1, NONE, dtype=np.int64)
    last[ops.forward_op_id[rows]] = rows
    return last


def _held(step: Step) -> Ints:
    """Returns the last operator up to which anything but the backward nodes that saved it holds each storage."""
    ops, storages, uses, calls = step.ops, step.storages, step.uses, step.module_calls
    count = len(storages)
    held = np.where(storages.created_op_id == NONE, 0, storages.created_op_id)
    pairs = np.unique(step.saved.forward_op_id * count + step.saved.storage_id)
    node = ops.forward_op_id[uses.op_id]
    by_packer = (node != NONE) & np.isin(node * count + uses.storage_id, pairs)
    np.maximum.at(held, uses.storage_id[~by_packer], uses.op_id[~by_packer])
    # A call's frames hold its arguments until it returns.
    calls_run = np.flatnonzero((calls.first_op_id != NONE) & (calls.last_op_id != NONE) & ~calls.is_recompute)
    order = np.argsort(uses.op_id, kind="stable")
    use_op, use_storage = uses.op_id[order], uses.storage_id[order]
    for call in calls_run.tolist():
        first, last = int(calls.first_op_id[call]), int(calls.last_op_id[call])
        low, high = np.searchsorted(use_op, [first, last + 1])
        touched = np.unique(use_storage[low:high])
        given = touched[storages.created_op_id[touched] < first]
        held[given] = np.maximum(held[given], last)
    return held
