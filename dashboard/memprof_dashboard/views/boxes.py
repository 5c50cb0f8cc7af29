"""Live bytes at one moment by module: nested boxes that sum exactly to the total."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, TypeVar

import numpy as np

from memprof.analysis.report.module_tree import ModuleTree
from memprof.replay.history import History
from memprof.trace.schema import NONE, Ints

#: Maximum number of boxes; smaller ones are included in their parent.
MOST_BOXES = 400
#: Label of the box of bytes outside any module.
OUTSIDE = "outside any module"


@dataclass(frozen=True)
class Box:
    """One box.

    Attributes:
        parent: Place of the box around it, ``NONE`` for the outermost.
        label: What stands on it.
        size: Bytes, with all boxes inside.
        category: The category that most of it is of.
        find: What finds its storages by name; empty where no search does.
        split: Bytes by category of a box that holds no other.
    """

    parent: int
    label: str
    size: int
    category: str
    find: str = ""
    split: Mapping[str, int] = field(default_factory=dict)


class Nested(Protocol):
    """A node of nested boxes."""

    @property
    def size(self) -> int:
        """Bytes, with all nodes inside."""

    @property
    def inside(self) -> Mapping[str, Self]:
        """The nodes inside, by their label."""


_Node = TypeVar("_Node", bound=Nested)


def largest_nodes(root: _Node, label: str) -> list[tuple[int, str, _Node]]:
    """Returns the ``MOST_BOXES`` largest nodes; the bytes of a smaller one are part of the node around it.

    Returns:
        Place of the node around, ``NONE`` for the root; label; and node. Outer nodes come before those inside them,
        and of those inside one node the largest first.
    """
    sizes: list[int] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        sizes.append(node.size)
        waiting += node.inside.values()
    least = max(sorted(sizes, reverse=True)[min(MOST_BOXES, len(sizes)) - 1], 1)
    found: list[tuple[int, str, _Node]] = []
    queue = deque([(NONE, label, root)])
    while queue and len(found) < MOST_BOXES:
        parent, name, node = queue.popleft()
        if parent != NONE and node.size < least:
            continue
        own = len(found)
        found.append((parent, name, node))
        inside = sorted(node.inside.items(), key=lambda item: (-item[1].size, item[0]))
        queue += [(own, name, child) for name, child in inside]
    return found


def bytes_by_node(history: History, tree: ModuleTree, at: int) -> dict[str, Ints]:
    """Splits the live bytes during an operator by category and node, workspace included.

    Returns:
        Bytes by category, those that are alive only, each of shape ``(nodes + 1,)``: what belongs to no module is
        last. All of them sum to ``history.total[at]``; but where the operator gave memory back before it took new, its
        workspace is negative, has no box, and they sum to as much more.
    """
    rows = history.alive(at)
    node_of_module = np.append(tree.node_of_module, NONE)
    nodes = node_of_module[history.owner[rows]]
    split: dict[str, Ints] = {}
    for code, category in enumerate(history.storage_categories):
        of_category = history.category[rows] == code
        sums = np.zeros(len(tree) + 1, dtype=np.int64)
        np.add.at(sums, nodes[of_category], history.size[rows[of_category]])  # NONE is the last place
        if sums.any():
            split[category] = sums
    workspace = history.workspace(at)
    if workspace > 0:
        sums = split.setdefault("workspace", np.zeros(len(tree) + 1, dtype=np.int64))
        sums[node_of_module[history.module[at]]] += workspace
    return split


def boxes_by_module(split: dict[str, Ints], tree: ModuleTree) -> list[Box]:
    """Returns the boxes of the modules, and one of what belongs to none."""
    boxes = [Box(NONE, "live bytes", _total(split), _main(split))]
    _add(boxes, 0, split, tree, MOST_BOXES)
    return boxes


def boxes_by_category(split: dict[str, Ints], tree: ModuleTree, labels: dict[str, str]) -> list[Box]:
    """Returns a box for each category, with those of its modules inside.

    Args:
        split: Bytes by category and node.
        tree: The modules.
        labels: What people call the categories.
    """
    boxes = [Box(NONE, "live bytes", _total(split), _main(split))]
    for category, sums in sorted(split.items(), key=lambda item: (-int(item[1].sum()), item[0])):
        boxes.append(Box(0, labels.get(category, category), int(sums.sum()), category))
        _add(boxes, len(boxes) - 1, {category: sums}, tree, MOST_BOXES // len(split))
    return boxes


def _add(boxes: list[Box], outermost: int, split: dict[str, Ints], tree: ModuleTree, most: int) -> None:
    """Adds the boxes of the modules inside ``outermost``."""
    own = np.array(list(split.values()), dtype=np.int64).reshape(len(split), len(tree) + 1)
    whole = tree.with_children(own[:, :-1].sum(axis=0))
    # A node is never larger than its parent, and on a tie the parent sorts first.
    order = np.lexsort((tree.depth, -whole))[:most]
    kept = order[whole[order] > 0]
    place: dict[int, int] = {}
    has_children = np.zeros(len(tree) + 1, dtype=np.bool_)
    has_children[tree.parent[kept]] = True
    inside = tree.with_children(own[:, :-1])
    for node in kept.tolist():
        parent = int(tree.parent[node])
        place[node] = len(boxes)
        boxes.append(
            Box(
                parent=outermost if parent == NONE else place[parent],
                label=_label(tree, node),
                size=int(whole[node]),
                category=_largest(split, inside[:, node]),
                find=find_text(tree.title(node)),
                split=_by_category(split, inside[:, node]),
            )
        )
    for node in kept[has_children[kept]].tolist():
        rest = int(whole[node]) - int(whole[kept[tree.parent[kept] == node]].sum())
        if rest:
            amounts = inside[:, node] - inside[:, kept[tree.parent[kept] == node]].sum(axis=1)
            is_own = rest == int(own[:, node].sum())
            label = "own" if is_own else "own and smaller submodules"
            found, parts = boxes[place[node]].find, _by_category(split, amounts)
            boxes.append(Box(place[node], label, rest, _largest(split, amounts), found, split=parts))
    outside = own[:, -1]
    dropped = int(own.sum()) - int(outside.sum()) - int(whole[kept[tree.parent[kept] == NONE]].sum())
    if outside.any():
        parts = _by_category(split, outside)
        boxes.append(Box(outermost, OUTSIDE, int(outside.sum()), _largest(split, outside), split=parts))
    if dropped:
        boxes.append(Box(outermost, "smaller modules", dropped, "unknown"))


def simplified(boxes: Sequence[Box], labels: Callable[[str], str]) -> list[Box]:
    """Returns boxes for a treemap: innermost ones split by category, a box around a single one of its size left out."""
    inside: dict[int, list[int]] = {}
    for place, box in enumerate(boxes):
        inside.setdefault(box.parent, []).append(place)
    made: list[Box] = []
    waiting = deque([(NONE, 0)] if boxes else [])
    while waiting:
        parent, place = waiting.popleft()
        box = boxes[place]
        while box.parent != NONE and [boxes[one].size for one in inside.get(place, [])] == [box.size]:
            (place,) = inside[place]
            box = replace(boxes[place], label=f"{box.label} / {boxes[place].label}")
        made.append(replace(box, parent=parent))
        own = len(made) - 1
        waiting += [(own, one) for one in inside.get(place, [])]
        is_mixed = max(box.split.values(), default=box.size) < 0.95 * box.size
        if place not in inside and is_mixed and box.size * MOST_BOXES > 4 * boxes[0].size:
            by_size = sorted(box.split.items(), key=lambda part: -part[1])
            made += [Box(own, labels(name), size, name) for name, size in by_size]
    return made


def _by_category(split: dict[str, Ints], amounts: Ints) -> dict[str, int]:
    return {name: size for name, size in zip(split, amounts.tolist(), strict=True) if size}


def _label(tree: ModuleTree, node: int) -> str:
    """Returns a node's name relative to its parent, with its type where the name is a number."""
    label = tree.labels[node] if tree.parent[node] != NONE else tree.title(node)
    if label == "*" or label.isdecimal():
        label = f"{label} {tree.types[node]}"
    return f"{label} \N{MULTIPLICATION SIGN}{tree.counts[node]}" if tree.counts[node] > 1 else label


def find_text(title: str) -> str:
    """Returns a part of a folded name that all the modules it stands for have in theirs, and few others: its end."""
    *before, end = title.split("*")
    return end if any(letter.isalpha() for letter in end) else max([*before, end], key=len)


def _largest(split: dict[str, Ints], amounts: Ints) -> str:
    return list(split)[int(np.argmax(amounts))]


def _main(split: dict[str, Ints]) -> str:
    return max(split, key=lambda category: int(split[category].sum()), default="unknown")


def _total(split: dict[str, Ints]) -> int:
    return sum(int(sums.sum()) for sums in split.values())
