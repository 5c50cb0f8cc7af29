"""What changed between moments of two recordings: nested boxes by module, line or stack, as large as what changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.analysis.diff.moved_lines import moved_lines
from memprof.analysis.diff.summary import PEAK
from memprof.analysis.report.module_tree import ModuleTree
from memprof.trace.schema import NONE
from memprof_dashboard.rank import Rank
from memprof_dashboard.views.boxes import OUTSIDE, bytes_by_node, largest_nodes
from memprof_dashboard.views.code_boxes import bytes_by_path

#: Bytes by path, from the outermost to the innermost box.
_Paths = dict[tuple[str, ...], int]


@dataclass(frozen=True)
class ChangedBox:
    """One box.

    Attributes:
        parent: Place of the box around it, ``NONE`` for the outermost.
        label: What stands on it.
        base: Bytes in the base.
        head: Bytes in the other recording.
        size: Bytes that changed in it, in either direction: what grew and what shrank inside it do not cancel out.
    """

    parent: int
    label: str
    base: int
    head: int
    size: int


@dataclass
class _Node:
    base: int = 0
    head: int = 0
    size: int = 0
    inside: dict[str, _Node] = field(default_factory=dict)


def moment_of(rank: Rank, name: str) -> int:
    """Returns the operator at the peak of the fullest step, or of one of its phases.

    Args:
        rank: The recording.
        name: ``PEAK``, or the phase; the peak of the step where it lacks the phase.
    """
    history = rank.history
    first, end = rank.step_range(rank.fullest_number())
    if name != PEAK and name in history.phases:
        inside = first + np.flatnonzero(history.phase[first:end] == history.phases.index(name))
        if len(inside):
            return int(inside[np.argmax(history.total[inside])])
    return history.peak(first, end)


def changed_boxes(base: Rank, head: Rank, moment: str, by: str) -> list[ChangedBox]:
    """Returns the boxes of what changed between two recordings, the outermost first.

    Args:
        base: The one to start from.
        head: The other.
        moment: ``PEAK``, or a phase.
        by: ``module``, ``line`` or ``stack``.

    Returns:
        The boxes; paths without a change have none, and those beyond ``MOST_BOXES`` are part of the box around them.
    """
    before, after = (_paths(rank, moment_of(rank, moment), by) for rank in (base, head))
    if by != "module":
        before = _moved(before, after)
    root = _Node()
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path, 0), after.get(path, 0)
        node = root
        for part in ("", *path):
            node = node.inside.setdefault(part, _Node()) if part else node
            node.base += old
            node.head += new
            node.size += abs(new - old)
    return [
        ChangedBox(parent, label, node.base, node.head, node.size)
        for parent, label, node in largest_nodes(root, "all changes")
    ]


def _paths(rank: Rank, at: int, by: str) -> _Paths:
    paths: _Paths = {}
    if by == "module":
        tree = rank.tree
        for sums in bytes_by_node(rank.history, tree, at).values():
            for node in np.flatnonzero(sums).tolist():
                path = _names(tree, node) if node < len(tree) else (OUTSIDE,)
                paths[path] = paths.get(path, 0) + int(sums[node])
        return paths
    for path, _, size in bytes_by_path(rank, at, by_stack=by == "stack"):
        paths[path] = paths.get(path, 0) + size
    return paths


def _names(tree: ModuleTree, node: int) -> tuple[str, ...]:
    names: list[str] = []
    while node != NONE:
        label = tree.labels[node]
        names.append(f"{label} {tree.types[node]}" if label == "*" or label.isdecimal() else label or tree.title(node))
        node = int(tree.parent[node])
    return tuple(reversed(names))


def _moved(before: _Paths, after: _Paths) -> _Paths:
    """Renames lines of the base that an edit above them has moved."""
    lines: list[dict[str, int]] = []
    for paths in (before, after):
        lines.append({})
        for path, size in paths.items():
            for part in dict.fromkeys(path):
                place = part.partition(" ")[0]
                lines[-1][place] = lines[-1].get(place, 0) + size
    renamed = moved_lines(*lines)
    moved: _Paths = {}
    for path, size in before.items():
        parts = (part.partition(" ") for part in path)
        now = tuple(f"{renamed.get(place, place)}{space}{rest}" for place, space, rest in parts)
        moved[now] = moved.get(now, 0) + size
    return moved
