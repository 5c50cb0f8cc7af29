"""Live bytes at one moment by the code that allocated them: nested boxes of files and lines, or of stacks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.trace.schema import NONE
from memprof_dashboard.sources import Rank
from memprof_dashboard.views.boxes import Box, largest_nodes
from memprof_dashboard.views.groups import BEFORE, frames_of


@dataclass
class _Node:
    """Bytes below one box, by category."""

    split: dict[str, int] = field(default_factory=dict)
    inside: dict[str, _Node] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(self.split.values())


def boxes_by_code(rank: Rank, at: int, *, by_stack: bool, is_inverted: bool = False) -> list[Box]:
    """Returns the boxes of the code that allocated what is alive during an operator.

    Args:
        rank: The recording.
        at: The operator.
        by_stack: Nest the frames of each stack, outermost first, instead of files, lines and operators.
        is_inverted: Nest them the other way around: operators outermost.

    Returns:
        The boxes, outermost first; the innermost sum to the bytes alive, with the kernel's workspace if positive.
    """
    root = _Node()
    for path, category, size in bytes_by_path(rank, at, by_stack=by_stack):
        _put(root, path[::-1] if is_inverted else path, category, size)
    boxes = []
    for parent, label, node in largest_nodes(root, "live bytes"):
        main = max(node.split, key=lambda name: node.split[name], default="unknown")
        boxes.append(Box(parent, label, node.size, main, find=label if parent != NONE else "", split=node.split))
    return boxes


def bytes_by_path(rank: Rank, at: int, *, by_stack: bool) -> list[tuple[tuple[str, ...], str, int]]:
    """Returns what is alive during an operator by the code that allocated it; arguments as for ``boxes_by_code``.

    Returns:
        The path from the outermost to the innermost box, the category, and the bytes.
    """
    history = rank.history
    rows = history.alive(at)
    made = history.created[rows]
    is_made = made != NONE
    stacks = np.where(is_made, rank.op_stacks[np.maximum(made, 0)], NONE).astype(np.int64)
    names = np.where(is_made, rank.op_names.codes[np.maximum(made, 0)].astype(np.int64), NONE)
    keys = np.stack([history.category[rows].astype(np.int64), stacks, names], axis=1)
    distinct, place = np.unique(keys, axis=0, return_inverse=True)
    sums = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(sums, place.reshape(-1), history.size[rows])
    found = [
        (_path(rank, stack, name, by_stack=by_stack), history.storage_categories[category], size)
        for (category, stack, name), size in zip(distinct.tolist(), sums.tolist(), strict=True)
    ]
    workspace = history.workspace(at)
    if workspace > 0:
        code = int(rank.op_names.codes[at])
        found.append((_path(rank, int(rank.op_stacks[at]), code, by_stack=by_stack), "workspace", workspace))
    return found


def _path(rank: Rank, stack: int, name: int, *, by_stack: bool) -> tuple[str, ...]:
    if stack == NONE:
        return (BEFORE,) if name == NONE else (str(rank.op_names.distinct[name]),)
    operator = (str(rank.op_names.distinct[name]),) if name != NONE else ()
    if by_stack:
        return (*frames_of(rank, stack), *operator)
    line = rank.sources.of_stack(stack)
    return (line.place.rpartition(":")[0] or line.place, line.place, *operator) if line else operator or (BEFORE,)


def _put(root: _Node, path: tuple[str, ...], category: str, size: int) -> None:
    node = root
    node.split[category] = node.split.get(category, 0) + size
    for part in path:
        node = node.inside.setdefault(part, _Node())
        node.split[category] = node.split.get(category, 0) + size
