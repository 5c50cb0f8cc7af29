"""How long each storage is needed, and operators that could write their result over an input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memprof.replay.allocator.rules import ROUNDING_BYTES
from memprof.trace.operator_facts import POINTWISE, are_among
from memprof.trace.schema import NONE, Bools, Floats, Ints
from memprof.trace.step import Step


@dataclass(frozen=True, eq=False)
class Intervals:
    """Storages and workspaces of a step, each with the operators it is needed during; columns of shape ``(lives,)``.

    Attributes:
        first: First operator during which it is needed.
        last: Last one, itself included.
        size: Bytes, rounded up to the allocator's unit.
        storage_id: Storage of the step, NONE for workspaces.
        is_fixed: Whether it is live before and after the step: weights and the like, which no plan can move.
        ops: Operators of the step.
    """

    first: Ints
    last: Ints
    size: Ints
    storage_id: Ints
    is_fixed: Bools
    ops: int

    def __len__(self) -> int:
        return len(self.size)

    def load(self) -> Ints:
        """Returns the bytes needed during each operator, shape ``(ops,)``."""
        change = np.zeros(self.ops + 1, dtype=np.int64)
        np.add.at(change, self.first, self.size)
        np.subtract.at(change, self.last + 1, self.size)
        load: Ints = np.cumsum(change[:-1])
        return load

    def lower_bound(self) -> int:
        """Returns the peak bytes needed at once: a lower bound for any plan."""
        return int(self.load().max(initial=0))

    def total(self) -> int:
        """Returns the bytes of all lives together: a plan without any sharing."""
        return int(self.size.sum())

    def take(self, rows: Ints | Bools) -> Intervals:
        """Returns some of the lives."""
        return replace(
            self,
            first=self.first[rows],
            last=self.last[rows],
            size=self.size[rows],
            storage_id=self.storage_id[rows],
            is_fixed=self.is_fixed[rows],
        )


def recorded_lives(step: Step, device: str) -> Intervals:
    """Returns the recorded lives: from the operator that made a storage to the one after which it was freed.

    Args:
        step: The step, recorded or predicted.
        device: The device whose memory is planned, such as ``cuda:0``; ``cpu`` for everything of a step on CPU.
    """
    return _lives(step, device, step.storages.freed_op_id)


def needed_lives(step: Step, device: str) -> Intervals:
    """Returns the lives a static planner needs: to the last operator that touches a storage.

    Storages that outlive the step are kept to its end, since their later readers are unknown. Where no reads were
    recorded at all, the recorded lives are returned.

    Args:
        step: The step, recorded or predicted.
        device: As in ``recorded_lives``.
    """
    if not has_reads(step):
        return recorded_lives(step, device)
    last = np.maximum(step.storages.created_op_id, 0)
    np.maximum.at(last, step.uses.storage_id, step.uses.op_id)
    freed = step.storages.freed_op_id
    # A storage no operator touches again is not needed; none outlives its recorded death.
    return _lives(step, device, np.where(freed == NONE, NONE, np.minimum(last, freed)))


def has_reads(step: Step) -> bool:
    """Returns whether it is recorded which operators read which storages; imported snapshots lack this."""
    return bool(np.any(step.uses.role != "write"))


def _lives(step: Step, device: str, last: Ints) -> Intervals:
    storages, ops = step.storages, len(step.ops)
    is_planned = storages.allocated_bytes > 0
    if device != "cpu":
        is_planned &= storages.device == device
    rows = np.flatnonzero(is_planned)
    workers = np.flatnonzero(step.ops.workspace_bytes > 0)
    first = np.concatenate([np.maximum(storages.created_op_id[rows], 0), workers])
    end = np.where(last[rows] == NONE, ops - 1, last[rows])
    size = np.concatenate([storages.allocated_bytes[rows], step.ops.workspace_bytes[workers]])
    is_fixed = (storages.created_op_id[rows] == NONE) & (storages.freed_op_id[rows] == NONE)
    return Intervals(
        first=first,
        last=np.concatenate([end, workers]),
        size=-(-size // ROUNDING_BYTES) * ROUNDING_BYTES,
        storage_id=np.concatenate([rows, np.full(len(workers), NONE, dtype=np.int64)]),
        is_fixed=np.concatenate([is_fixed, np.zeros(len(workers), dtype=np.bool_)]),
        ops=ops,
    )


@dataclass(frozen=True, eq=False)
class Candidates:
    """Pairs of an output and the input whose memory it could reuse.

    Attributes:
        life: Index of the output among the lives, shape ``(pairs,)``.
        over: Index of the input it could overwrite.
        op_id: The operator.
    """

    life: Ints
    over: Ints
    op_id: Ints

    def __len__(self) -> int:
        return len(self.life)

    def take(self, rows: Ints | Bools) -> Candidates:
        """Returns some of the pairs."""
        return Candidates(self.life[rows], self.over[rows], self.op_id[rows])


def find_candidates(step: Step, lives: Intervals) -> Candidates:
    """Finds the outputs that could overwrite an input.

    The operator is elementwise and the last to touch the input, which was made in the step and is as large as the
    output. Each input is used once.
    """
    place = np.full(len(step.storages), NONE, dtype=np.int64)
    known = np.flatnonzero(lives.storage_id != NONE)
    place[lives.storage_id[known]] = known
    is_pointwise = are_among(step.ops.name, POINTWISE)
    uses = step.uses
    is_relevant = is_pointwise[uses.op_id] & (place[uses.storage_id] != NONE)
    op_id, life = uses.op_id[is_relevant], place[uses.storage_id[is_relevant]]
    is_output = lives.first[life] == op_id
    is_output &= step.storages.created_op_id[lives.storage_id[life]] == op_id
    may_go = (lives.last[life] == op_id) & ~is_output & ~lives.is_fixed[life]
    may_go &= (step.storages.created_op_id[lives.storage_id[life]] != NONE) & (
        step.storages.freed_op_id[lives.storage_id[life]] != NONE
    )
    inputs: dict[int, list[int]] = {}
    for op, row in zip(op_id[may_go].tolist(), life[may_go].tolist(), strict=True):
        inputs.setdefault(op, []).append(row)
    pairs: list[tuple[int, int, int]] = []
    taken: set[int] = set()
    served: set[int] = set()
    for op, row in zip(op_id[is_output].tolist(), life[is_output].tolist(), strict=True):
        free = (one for one in inputs.get(op, []) if one not in taken and lives.size[one] == lives.size[row])
        over = NONE if row in served else next(free, NONE)
        if over != NONE:
            taken.add(over)
            served.add(row)
            pairs.append((row, over, op))
    columns = np.array(sorted(pairs, key=lambda pair: (pair[2], pair[0])), dtype=np.int64).reshape(-1, 3)
    return Candidates(columns[:, 0], columns[:, 1], columns[:, 2])


def in_place(lives: Intervals, chosen: Candidates) -> Intervals:
    """Merges each chosen output with the input it overwrites: one life, from the input's start to the output's end.

    Args:
        lives: The lives.
        chosen: Pairs; chains of them become one life.

    Returns:
        The remaining lives, in order.
    """
    root = np.arange(len(lives))
    first, last = lives.first.copy(), lives.last.copy()
    for life, over in zip(chosen.life.tolist(), chosen.over.tolist(), strict=True):  # in order of operators
        host = int(root[over])
        root[life] = host
        last[host] = max(last[host], last[life])
    kept = np.flatnonzero(root == np.arange(len(lives)))
    return replace(lives, first=first, last=last).take(kept)


@dataclass(frozen=True, eq=False)
class Sections:
    """Lives over sections: the moments at which a set of lives is alive that no other moment has all of.

    Two lives that meet meet in a section, so that offsets are valid if they are in each section.

    Attributes:
        rows: Index of each among the lives given, shape ``(lives,)``.
        size: Its bytes.
        ops: Operators it is needed during.
        first: Its first section.
        end: The section after its last.
        count: Number of sections.
    """

    rows: Ints
    size: Ints
    ops: Ints
    first: Ints
    end: Ints
    count: int

    @classmethod
    def of(cls, first: Ints, last: Ints, size: Ints) -> Sections:
        """Finds the sections of some lives.

        Args:
            first: First operator of each, shape ``(lives,)``.
            last: Last operator of each, itself included.
            size: Bytes of each.
        """
        # A section is the operator of a start that is followed by an end before the next start.
        starts, ends = np.unique(first), np.unique(last)
        chosen = starts[np.unique(np.searchsorted(starts, ends, side="right")) - 1]
        return cls(
            rows=np.arange(len(size)),
            size=size,
            ops=last - first + 1,
            first=np.searchsorted(chosen, first),
            end=np.searchsorted(chosen, last, side="right"),
            count=len(chosen),
        )

    def __len__(self) -> int:
        return len(self.size)

    def take(self, rows: Ints) -> Sections:
        """Returns the lives in another order."""
        columns = {name: getattr(self, name)[rows] for name in ("rows", "size", "ops", "first", "end")}
        return replace(self, **columns)

    def total(self) -> Ints:
        """Returns the bytes in each section, shape ``(count,)``."""
        change = np.zeros(self.count + 1, dtype=np.int64)
        np.add.at(change, self.first, self.size)
        np.subtract.at(change, self.end, self.size)
        total: Ints = np.cumsum(change[:-1])
        return total

    def crossing(self) -> Ints:
        """Returns how many lives are in both a section and the next one, shape ``(count,)``; none after the last."""
        change = np.zeros(self.count + 1, dtype=np.int64)
        np.add.at(change, self.first, 1)
        np.subtract.at(change, self.end - 1, 1)
        crossing: Ints = np.cumsum(change[:-1])
        return crossing

    def members(self) -> tuple[Ints, Ints]:
        """Returns the lives of each section, one section after the other, and where each section starts in them."""
        spans = self.end - self.first
        life = np.repeat(np.arange(len(self)), spans)
        section = np.arange(len(life)) - np.repeat(np.cumsum(spans) - spans, spans) + self.first[life]
        order = np.argsort(section, kind="stable")
        return life[order], np.searchsorted(section[order], np.arange(self.count + 1))

    def fullest(self) -> Ints:
        """Returns the bytes of the fullest section each life is in, shape ``(lives,)``."""
        total = self.total()
        spans = np.stack([self.first, self.end], axis=1).ravel()
        padded = np.append(total, 0)
        fullest: Ints = np.maximum.reduceat(padded, spans)[::2]
        return fullest

    def shuffled(self, random: np.random.Generator) -> Sections:
        """Returns the lives ordered by a random weighting of the measures, with a little noise."""
        weights = random.dirichlet(np.ones(4)) * (1, 1, 1, 4)
        measures = np.stack([self.end - self.first, self.ops, self.size, self.fullest()])
        score: Floats = weights @ np.log(np.maximum(measures, 1)) + random.normal(0, 0.02, len(self))
        return self.take(np.argsort(-score, kind="stable"))
