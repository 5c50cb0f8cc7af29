"""Changes between two open recordings: compared once, in sentences, and as nested boxes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from memprof.analysis.diff.comparison import Diff, Pair, compare, fold_layers
from memprof.analysis.diff.moved_lines import moved_lines
from memprof.analysis.diff.summary import PEAK, Summary, summarise_step
from memprof.analysis.report.module_tree import ModuleTree
from memprof.trace.manifest import PREDICTED
from memprof.trace.schema import NONE
from memprof.trace.whole_steps import has_untouched_step, require_whole_step
from memprof.units import format_us
from memprof_dashboard.rank import Rank
from memprof_dashboard.views.boxes import OUTSIDE, bytes_by_node, largest_nodes
from memprof_dashboard.views.code_boxes import bytes_by_path

#: Bytes by path, from the outermost to the innermost box.
_Paths = dict[tuple[str, ...], int]


@lru_cache(maxsize=4)
def changes(base: Rank, head: Rank) -> Diff:
    """Compares one process of each of two recordings.

    Raises:
        BadInputError: One holds no operators, or is damaged.
        InconclusiveError: One holds no whole step, or they are of different models.
    """
    return compare([_summary(base)], [_summary(head)])


@lru_cache(maxsize=8)
def _summary(rank: Rank) -> Summary:
    trace = rank.trace
    require_whole_step(trace)
    step = trace.fullest_step()
    is_known = has_untouched_step(trace) or trace.manifest.backend.name == PREDICTED
    return dataclasses.replace(
        summarise_step(step, trace.manifest, trace.earlier_stacks(step)),
        step_time_us=step.duration_us if is_known else math.nan,
        step_peaks=tuple(trace.step_peaks().values()),
        is_complete=trace.manifest.capture.is_complete,
    )


def pair_at(base: Rank, head: Rank, moment: object) -> Pair:
    """Returns the pair of moments of a name, repeated layers in one row; that of the peaks for an unknown name."""
    found = changes(base, head)
    chosen = next((pair for pair in (found.peak, *found.phases) if pair.name == moment), found.peak)
    return dataclasses.replace(chosen, parts={**chosen.parts, "module": fold_layers(chosen.parts["module"])})


def shift(pair: Pair) -> str:
    """Returns whether the moments of a pair are in the same phase and module."""
    base, head = pair.base, pair.head
    if base is None:
        return "Only in the head." if head is not None else "In neither recording."
    if head is None:
        return "Only in the base."
    if base.place != head.place:
        return f"In {base.place} before, in {head.place} now."
    if base.op != head.op:
        return f"Still in {head.place}; operator changed from {base.op} to {head.op}."
    return f"Still in {head.place} ({head.op})."


def step_time(found: Diff) -> str:
    """Returns the step time of both recordings."""
    base, head = found.base.step_time_us, found.head.step_time_us
    if math.isnan(base) or math.isnan(head):
        return "not measured in both: let the job run at least two steps beyond the window"
    share = f" ({100 * (head - base) / base:+.1f} %)" if base else ""
    return f"{format_us(base)} in the base, {format_us(head)} in the head{share}"


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
