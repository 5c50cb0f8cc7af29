"""The tree of modules, repeated layers folded into one node, and names with ranges of layers (``layers.0-11.mlp``)."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from memprof.errors import BadInputError
from memprof.trace.schema import NONE, Ints, Modules

N = TypeVar("N", np.int64, np.float64)

#: Minimum number of like siblings (``layers.0``, ``layers.1``, ...) that a folded tree shows as one node.
SMALLEST_FOLD = 3


@dataclass(frozen=True, eq=False)
class ModuleTree:
    """A tree whose nodes stand for one module each, or for several alike.

    Attributes:
        names: Qualified name, with ``*`` for the number of a folded layer; "" for the root of a job with one model.
        labels: The name relative to the parent's; the type for a root without a name.
        types: Class name.
        counts: Number of modules per node, shape ``(nodes,)``.
        parent: The node above, ``NONE`` for a root, shape ``(nodes,)``.
        depth: Number of ancestors, shape ``(nodes,)``.
        node_of_module: Node of each module of the trace, shape ``(modules,)``.
    """

    names: tuple[str, ...]
    labels: tuple[str, ...]
    types: tuple[str, ...]
    counts: Ints
    parent: Ints
    depth: Ints
    node_of_module: Ints

    def __len__(self) -> int:
        return len(self.names)

    def title(self, node: int) -> str:
        """Returns the qualified name of a node, or its type where it has none (the root)."""
        return self.names[node] or self.types[node]

    def nodes_of(self, module_ids: Ints) -> Ints:
        """Returns the node of each module; ``NONE`` stays ``NONE``."""
        return np.where(module_ids == NONE, NONE, np.append(self.node_of_module, NONE)[module_ids])

    def sum_by_node(self, module_ids: Ints, amounts: Ints) -> Ints:
        """Sums integer amounts by node, excluding those outside any module, shape ``(nodes,)``."""
        sums = np.zeros(len(self), dtype=np.int64)
        nodes = self.nodes_of(module_ids)
        np.add.at(sums, nodes[nodes != NONE], amounts[nodes != NONE])
        return sums

    def with_children(self, own: npt.NDArray[N]) -> npt.NDArray[N]:
        """Adds to each node the amounts of all its descendants.

        Args:
            own: Amount of each node without descendants, shape ``(..., nodes)``.

        Returns:
            The sums, same shape.
        """
        sums = own.copy()
        for level in range(int(self.depth.max(initial=0)), 0, -1):
            nodes = np.flatnonzero(self.depth == level)
            # Transposed so that nodes are the first axis, whatever else the sums are split by.
            np.add.at(sums.T, self.parent[nodes], sums.T[nodes])
        return sums

    def common_ancestors(self, nodes: Ints, others: Ints) -> Ints:
        """Returns the lowest common ancestor of each pair, ``NONE`` where there is none, shape as ``nodes``."""
        left, right = nodes.copy(), others.copy()
        depth = np.append(self.depth, -1)  # NONE indexes the last entry and is above every root
        parent = np.append(self.parent, NONE)
        while True:
            differ = left != right
            if not differ.any():
                return left
            climb_left = differ & (depth[left] >= depth[right])
            climb_right = differ & (depth[right] >= depth[left])
            left, right = np.where(climb_left, parent[left], left), np.where(climb_right, parent[right], right)


def module_tree(modules: Modules) -> ModuleTree:
    """Builds the tree with one node per module: nodes are module ids.

    Raises:
        BadInputError: The modules form a cycle.
    """
    rows = np.arange(len(modules))
    return ModuleTree(
        names=tuple(modules.name),
        labels=tuple(_label(modules, row) for row in range(len(modules))),
        types=tuple(modules.type),
        counts=np.ones(len(modules), dtype=np.int64),
        parent=modules.parent_id,
        depth=_depths(modules.parent_id),
        node_of_module=rows,
    )


def folded_tree(modules: Modules) -> ModuleTree:
    """Builds the tree in which numbered layers of one type under one parent share a node.

    Its name has ``*`` for the number: ``layers.*``, or ``GPT.Block.*`` in imported stacks.

    Descendants of folded layers are folded with them, by name and type. Fewer than ``SMALLEST_FOLD`` layers stay
    separate.

    Raises:
        BadInputError: The modules form a cycle.
    """
    depth = _depths(modules.parent_id)
    keys: list[tuple[object, ...]] = [()] * len(modules)
    for level in range(int(depth.max(initial=-1)) + 1):
        rows = np.flatnonzero(depth == level).tolist()
        layers: dict[tuple[object, ...], set[str]] = defaultdict(set)
        for row in rows:
            fold, label = _fold(modules, keys, row), _label(modules, row)
            layers[*fold, _starred(label)].add(label)
        for row in rows:
            fold, label = _fold(modules, keys, row), _label(modules, row)
            alike = (*fold, _starred(label))
            is_layer = level > 0 and alike[-1] != label and len(layers[alike]) >= SMALLEST_FOLD
            keys[row] = alike if is_layer else (*fold, label if level else row)
    return _share_nodes(modules, depth, keys)


def _starred(label: str) -> str:
    """Returns a label with ``*`` for its number: of ``3``, or of ``Block.3``, as imported layers are named."""
    stem, dot, number = label.rpartition(".")
    return f"{stem}{dot}*" if number.isdecimal() else label


def _fold(modules: Modules, keys: list[tuple[object, ...]], row: int) -> tuple[object, ...]:
    """Returns what the layers of one fold share: the parent's node and the type."""
    parent = modules.parent_id[row]
    return (keys[parent] if parent != NONE else (), modules.type[row])


def _share_nodes(modules: Modules, depth: Ints, keys: list[tuple[object, ...]]) -> ModuleTree:
    """Merges modules with equal keys into one node, parents before their children."""
    node_of_module = np.full(len(modules), NONE, dtype=np.int64)
    nodes: dict[tuple[object, ...], int] = {}
    names: list[str] = []
    labels: list[str] = []
    firsts: list[int] = []
    for row in np.argsort(depth, kind="stable").tolist():
        node = nodes.setdefault(keys[row], len(nodes))
        node_of_module[row] = node
        if node < len(firsts):
            continue
        parent = modules.parent_id[row]
        last = keys[row][-1]
        label = last if isinstance(last, str) and last.endswith("*") else _label(modules, row)
        above = names[node_of_module[parent]] if parent != NONE else ""
        names.append(f"{above}.{label}" if above else (label if parent != NONE else modules.name[row]))
        labels.append(label)
        firsts.append(row)
    first_rows = np.asarray(firsts, dtype=np.int64)
    parents = modules.parent_id[first_rows]
    return ModuleTree(
        names=tuple(names),
        labels=tuple(labels),
        types=tuple(modules.type[first_rows]),
        counts=np.bincount(node_of_module, minlength=len(names)).astype(np.int64),
        parent=np.where(parents == NONE, NONE, np.append(node_of_module, NONE)[parents]),
        depth=depth[first_rows],
        node_of_module=node_of_module,
    )


def _label(modules: Modules, row: int) -> str:
    name, parent = modules.name[row], modules.parent_id[row]
    if parent == NONE:
        return str(name or modules.type[row])
    above = modules.name[parent]
    return str(name[len(above) + 1 :] if above and name.startswith(f"{above}.") else name)


def _depths(parent_id: Ints) -> Ints:
    depth = np.zeros(len(parent_id), dtype=np.int64)
    parent = np.append(parent_id, NONE)
    above = parent_id
    while (above != NONE).any():
        depth += above != NONE
        if depth.max(initial=0) > len(parent_id):
            raise BadInputError("the trace's modules form a cycle; record the job again.")
        above = parent[above]
    return depth


#: A part of a module's name that is the number of a layer, and one that stands for several.
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]*)(?![^.])")
_RANGES = re.compile(r"(?=.*[-,])[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")
#: Far more than the modules of the largest models.
_MOST_NAMES = 1_000_000


def fold_alike(values: Mapping[str, Hashable]) -> Iterator[tuple[str, list[str]]]:
    """Groups modules with equal values whose names differ in the numbers of layers.

    Yields:
        A name, with the numbers as ranges, and the modules that it stands for, which are all that it could; every
        module once.
    """
    alike: dict[tuple[str, Hashable], list[str]] = {}
    for name, value in values.items():
        alike.setdefault((_NUMBER.sub("*", name), value), []).append(name)
    for names in alike.values():
        if is_grid(names):
            yield in_ranges(names), names
        else:  # ranges would name modules of another value
            yield from ((name, [name]) for name in names)


def is_grid(names: Collection[str]) -> bool:
    """Returns whether modules are all combinations of their numbers, so that ranges name these and no others."""
    split = [name.split(".") for name in names]
    is_even = len({len(parts) for parts in split}) == 1
    return is_even and math.prod(len(set(numbers)) for numbers in zip(*split, strict=True)) == len(names)


def in_ranges(names: Collection[str]) -> str:
    """Returns a name for modules whose names differ in numbers, such as ``layers.0-11.mlp``; ``*`` for other parts."""
    return ".".join(_numbers(set(parts)) for parts in zip(*(name.split(".") for name in names), strict=False))


def has_range(name: str) -> bool:
    """Returns whether a name stands for several modules, or looks as if it did."""
    return any(_RANGES.fullmatch(part) for part in name.split("."))


def names_in(name: str) -> list[str]:
    """Returns the modules that a name stands for: several if it has ranges.

    Raises:
        ValueError: They are more than any model has.
    """
    parts: list[list[range] | str] = []
    for part in name.split("."):
        ends = [one.partition("-") for one in part.split(",")] if _RANGES.fullmatch(part) else []
        parts.append([range(int(low), int(high or low) + 1) for low, _, high in ends] or part)
    if math.prod(1 if isinstance(part, str) else sum(map(len, part)) for part in parts) > _MOST_NAMES:
        raise ValueError(f"{name}, which names too many modules")
    listed = [[part] if isinstance(part, str) else map(str, itertools.chain(*part)) for part in parts]
    return [".".join(combined) for combined in itertools.product(*listed)]


def _numbers(texts: set[str]) -> str:
    """Returns numbers as ranges, ``0-11`` or ``0-3,6``; a single text as it is, several others as ``*``."""
    if len(texts) == 1:
        return texts.pop()
    if not all(text.isdecimal() for text in texts):
        return "*"
    ranges: list[list[int]] = []
    for number in sorted(map(int, texts)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
