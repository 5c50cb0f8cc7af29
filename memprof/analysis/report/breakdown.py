"""Live memory at one moment of a step, split so that the parts always sum to the whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from memprof.analysis.report.module_tree import ModuleTree
from memprof.analysis.report.sources import SourceLine, Sources
from memprof.json_values import LEFT_OUT
from memprof.replay.live import alive_at
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

K = TypeVar("K", bound=Hashable)

WORKSPACE = "workspace"


@dataclass(frozen=True)
class Part(Generic[K]):
    """One part of a whole.

    Attributes:
        key: What the part is; None for bytes without a key (allocated before the step, outside any module, without a
            stack).
        bytes: Allocated bytes.
        storages: Number of its storages; kernel workspace counts as none.
    """

    key: K | None = field(metadata=LEFT_OUT)
    bytes: int
    storages: int


@dataclass(frozen=True)
class Breakdown(Generic[K]):
    """A whole and its parts, largest first.

    Attributes:
        total_bytes: The whole: exactly the sum of the parts.
        parts: The nonempty parts.
    """

    total_bytes: int
    parts: tuple[Part[K], ...]

    def top(self, limit: int) -> tuple[tuple[Part[K], ...], Part[K] | None, int]:
        """Returns the largest parts, the sum of the rest (None without a rest) and the number of parts in the rest."""
        if len(self.parts) <= limit:
            return self.parts, None, 0
        rest = self.parts[max(limit - 1, 0) :]
        summed = Part[K](None, sum(part.bytes for part in rest), sum(part.storages for part in rest))
        return self.parts[: max(limit - 1, 0)], summed, len(rest)


@dataclass(frozen=True, eq=False)
class Holding:
    """Everything live while one operator runs.

    Attributes:
        step: The step.
        op_id: The operator.
        rows: Rows of the live storages that take memory, in order of allocation.
        bytes: Their allocated bytes, shape as ``rows``.
        workspace_bytes: The operator's workspace, outside storages.
        earlier_stacks: Allocation stack of what an earlier step allocated, NONE for other storages; shape as ``rows``.
    """

    step: Step
    op_id: int
    rows: Ints
    bytes: Ints
    workspace_bytes: int
    earlier_stacks: Ints

    @property
    def total_bytes(self) -> int:
        """Allocated bytes including workspace: the counter's maximum during the operator."""
        return int(self.bytes.sum()) + self.workspace_bytes

    @property
    def makers(self) -> Ints:
        """The operator that allocated each storage, ``NONE`` for those live before the step."""
        return self.step.storages.created_op_id[self.rows]

    @property
    def stacks(self) -> Ints:
        """The Python stack that allocated each storage, ``NONE`` where unknown."""
        made = np.append(self.step.ops.stack_id, NONE)[self.makers]
        return np.where(self.makers == NONE, self.earlier_stacks, made)

    def only(self, is_kept: Bools) -> Holding:
        """Returns the same moment restricted to some storages, ``is_kept`` of shape as ``rows``."""
        return replace(
            self, rows=self.rows[is_kept], bytes=self.bytes[is_kept], earlier_stacks=self.earlier_stacks[is_kept]
        )


def hold_at(step: Step, op_id: int, earlier_stacks: Ints | None = None) -> Holding:
    """Lists what is live while an operator runs.

    Args:
        step: The step.
        op_id: The operator, counted from 0 in the step.
        earlier_stacks: The step's ``Trace.earlier_stacks``; None where not needed.
    """
    rows = np.flatnonzero(alive_at(step, op_id) & (step.storages.allocated_bytes > 0))
    known = np.full(len(rows), NONE) if earlier_stacks is None else earlier_stacks[rows]
    return Holding(step, op_id, rows, step.storages.allocated_bytes[rows], int(step.ops.workspace_bytes[op_id]), known)


def by_category(holding: Holding) -> Breakdown[str]:
    """Splits by category; a kernel's own memory is ``workspace``."""
    return _split(holding, holding.step.storages.category[holding.rows].tolist(), WORKSPACE)


def category_sources(holding: Holding) -> dict[str, dict[str, int]]:
    """Returns how the categories of imported memory were determined: bytes by category and source, largest first.

    Categories that were recorded, and those that are unknown, have no source and are left out.
    """
    storages = holding.step.storages
    keys = zip(storages.category[holding.rows], storages.category_source[holding.rows], strict=True)
    found: dict[str, dict[str, int]] = {}
    for part in split_bytes([f"{category} {source}" for category, source in keys], holding.bytes.tolist()).parts:
        category, _, source = str(part.key).rpartition(" ")
        if source:
            found.setdefault(category, {})[source] = part.bytes
    return found


def by_module(holding: Holding, tree: ModuleTree) -> Breakdown[int]:
    """Splits by the node of the module that owns or allocated the memory, excluding the nodes below it."""
    nodes = tree.nodes_of(holding.step.storages.module_id[holding.rows])
    workspace = tree.nodes_of(holding.step.ops.module_id[[holding.op_id]])
    return _split(holding, [_or_none(node) for node in nodes.tolist()], _or_none(int(workspace[0])))


def by_op(holding: Holding) -> Breakdown[str]:
    """Splits by the name of the operator that allocated the memory."""
    names = holding.step.ops.name
    keys = [names[op] if op != NONE else None for op in holding.makers.tolist()]
    return _split(holding, keys, names[holding.op_id])


def by_stack(holding: Holding, sources: Sources) -> Breakdown[tuple[SourceLine, ...]]:
    """Splits by the user's frames, innermost first, of the allocation stack.

    The stack of a backward operator is that of its forward operator.
    """
    return _merge(_by_stack_id(holding), lambda stack_id: sources.user_frames[stack_id] or None)


def by_source(holding: Holding, sources: Sources) -> Breakdown[SourceLine]:
    """Splits by the line of the user's code that allocated the memory."""
    return _merge(_by_stack_id(holding), sources.of_stack)


def by_phase(holding: Holding) -> Breakdown[str]:
    """Splits by the phase in which the memory was allocated; None is before the step."""
    phases = holding.step.ops.phase
    keys = [phases[op] if op != NONE else None for op in holding.makers.tolist()]
    return _split(holding, keys, phases[holding.op_id])


def by_metadata(holding: Holding) -> Breakdown[str]:
    """Splits by what the job noted of the memory in an imported snapshot; None is memory without a note."""
    noted = holding.step.storages.metadata[holding.rows].tolist()
    return _split(holding, [text or None for text in noted], None)


def _or_none(number: int) -> int | None:
    return None if number == NONE else number


def split_bytes(keys: Sequence[K | None], sizes: Sequence[int]) -> Breakdown[K]:
    """Sums storages by key."""
    return _sum_parts(list(zip(keys, sizes, [1] * len(sizes), strict=True)))


def _by_stack_id(holding: Holding) -> Breakdown[int]:
    keys = [_or_none(stack) for stack in holding.stacks.tolist()]
    return _split(holding, keys, _or_none(int(holding.step.ops.stack_id[holding.op_id])))


def _merge(split: Breakdown[int], key_of: Callable[[int], K | None]) -> Breakdown[K]:
    """Merges parts whose ids map to the same key; there are far fewer parts than storages."""
    return _sum_parts(
        [(None if part.key is None else key_of(part.key), part.bytes, part.storages) for part in split.parts]
    )


def _split(holding: Holding, keys: Sequence[K | None], workspace_key: K | None) -> Breakdown[K]:
    """Sums the storages by key and adds the operator's workspace under its key.

    Args:
        holding: The live memory.
        keys: The key of each storage, as long as ``holding.rows``.
        workspace_key: The key of the workspace.
    """
    pieces = list(zip(keys, holding.bytes.tolist(), [1] * len(keys), strict=True))
    return _sum_parts([*pieces, (workspace_key, holding.workspace_bytes, 0)])


def _sum_parts(pieces: Sequence[tuple[K | None, int, int]]) -> Breakdown[K]:
    totals: dict[K | None, int] = {}
    counts: dict[K | None, int] = {}
    for key, size, storages in pieces:
        totals[key] = totals.get(key, 0) + size
        counts[key] = counts.get(key, 0) + storages
    parts = [Part(key, total, counts[key]) for key, total in totals.items() if total]
    return Breakdown(sum(totals.values()), tuple(sorted(parts, key=lambda part: (-part.bytes, str(part.key)))))
