"""Live storages at one moment, like ones grouped, or found by a part of a name."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from memprof.analysis.report.module_tree import ModuleTree, in_ranges
from memprof.analysis.report.sources import SourceLine
from memprof.trace.schema import NONE, Bools, Ints
from memprof_dashboard.sources import Rank
from memprof_dashboard.views.boxes import OUTSIDE

#: Frames of a stack that name it.
_FRAMES = 3
#: Of bytes whose allocation has no line or stack.
BEFORE = "allocated before recording"


@dataclass(frozen=True, eq=False)
class Group:
    """Storages that are alike.

    Attributes:
        title: What they share: a module or several (``layers.0-11.mlp.0``), a line, or a stack.
        category: Category of all of them.
        rows: Their rows, the largest first, shape ``(storages,)``.
        size: Bytes of all of them.
        operator: The operator that allocated them; "" where they differ or were there before.
        source: The line that allocated them; None where they differ or where it is not known.
        tensor: Shape and dtype; "" where they differ.
    """

    title: str
    category: str
    rows: Ints
    size: int
    operator: str
    source: SourceLine | None
    tensor: str


def group_alike(rank: Rank, tree: ModuleTree, rows: Ints, by: str, most: int | None = None) -> list[Group]:
    """Groups storages, the largest group first.

    Args:
        rank: The recording.
        tree: Its modules, repeated layers folded.
        rows: The storages.
        by: ``module``, ``line`` or ``stack``.
        most: How many groups to return; None for all.
    """
    if not len(rows):
        return []
    history = rank.history
    made = history.created[rows]
    stacks = np.where(made == NONE, NONE, rank.op_stacks[np.maximum(made, 0)]).astype(np.int64)
    keys: list[np.ndarray]
    if by == "module":
        nodes = tree.nodes_of(history.owner[rows].astype(np.int64))
        names, shapes, dtypes = (rank.storage_texts[name].codes[rows] for name in ("name", "shape", "dtype"))
        operators = np.where(made == NONE, NONE, rank.op_names.codes[np.maximum(made, 0)].astype(np.int64))
        of_layers = np.append(tree.counts, 0)[nodes] > 1
        own_names = np.where(of_layers, NONE, names.astype(np.int64))
        keys = [history.category[rows], history.size[rows], nodes, operators, shapes, dtypes, own_names]
    else:
        keys = [history.category[rows], _numbered(rank, stacks, by)]
    _, places = np.unique(np.stack([key.astype(np.int64) for key in keys], axis=1), axis=0, return_inverse=True)
    places = places.reshape(-1)
    sums = np.zeros(int(places.max()) + 1, dtype=np.int64)
    np.add.at(sums, places, history.size[rows])
    order = np.argsort(places, kind="stable")
    members = np.split(rows[order], np.cumsum(np.bincount(places))[:-1])
    largest = np.argsort(-sums, kind="stable")[:most].tolist()
    return sorted((_group(rank, tree, members[place], by) for place in largest), key=lambda one: (-one.size, one.title))


def _numbered(rank: Rank, stacks: Ints, by: str) -> Ints:
    """Returns a number for the line, or the innermost frames, of each stack; equal ones have one number."""
    distinct, places = np.unique(stacks, return_inverse=True)
    numbers: dict[Hashable, int] = {}
    found = [
        numbers.setdefault(
            rank.sources.of_stack(stack) if by == "line" else frames_of(rank, stack)[-_FRAMES:], len(numbers)
        )
        for stack in distinct.tolist()
    ]
    return np.array(found, dtype=np.int64)[places.reshape(-1)]


def frames_of(rank: Rank, stack: int) -> tuple[str, ...]:
    """Returns the user's frames of a stack, outermost first, as ``file:line function``."""
    if not 0 <= stack < len(rank.sources.user_frames):
        return (BEFORE,)
    lines = rank.sources.user_frames[stack]
    return tuple(f"{line.place} {line.function}".strip() for line in reversed(lines)) or (BEFORE,)


def _group(rank: Rank, tree: ModuleTree, rows: Ints, by: str) -> Group:
    history = rank.history
    sizes = history.size[rows]
    rows = rows[np.lexsort((rows, -sizes))]
    made = history.created[rows]
    is_known = bool((made != NONE).all())
    operators = {str(rank.op_names[op_id]) for op_id in made.tolist()} if is_known else set()
    stacks = set(rank.op_stacks[made].tolist()) if is_known else set()
    lines = {rank.sources.of_stack(stack) for stack in stacks}
    line = lines.pop() if len(lines) == 1 else None
    texts = rank.storage_texts
    tensors = {f"{texts['shape'][row]} {texts['dtype'][row]}".strip() for row in rows.tolist()}
    if by == "module":
        title = modules_title(rank, history.owner[rows].astype(np.int64))
        name = str(texts["name"][int(rows[0])])
        title = name if len(rows) == 1 and name else title
    else:
        stack = next(iter(stacks)) if stacks else NONE
        frames = frames_of(rank, stack)
        title = (line.place if line else BEFORE) if by == "line" else " → ".join(frames[-_FRAMES:])
    return Group(
        title=title,
        category=history.storage_categories[history.category[rows[0]]],
        rows=rows,
        size=int(sizes.sum()),
        operator=operators.pop() if len(operators) == 1 else "",
        source=line,
        tensor=tensors.pop() if len(tensors) == 1 else "",
    )


def modules_title(rank: Rank, owners: Ints) -> str:
    """Returns a name for like modules, the numbers of repeated layers as ranges: ``layers.0-11.mlp.0``."""
    owner = int(owners[0])
    if owner == NONE:
        return OUTSIDE
    return in_ranges({rank.module_title(one) for one in set(owners.tolist())})


def storages_found(rank: Rank, text: str) -> Bools | None:
    """Returns which storages belong to, or were allocated by, something whose name contains a text.

    Looked through are the names of modules, of the operators that made them, of parameters and states, and the lines
    of the stacks; upper and lower case are the same.

    Returns:
        Shape ``(storages,)``; None where nothing is looked for.
    """
    wanted = text.strip().lower()
    if not wanted:
        return None
    history = rank.history

    def has(texts: np.ndarray) -> np.ndarray:
        return np.fromiter((wanted in str(one).lower() for one in texts), dtype=np.bool_, count=len(texts))

    # One place more for NONE, the last.
    modules = np.append(has(rank.modules.name) | has(rank.modules.type), False)
    stacks = np.append(has(rank.stacks.frames), False)
    operators = has(rank.op_names.distinct)[rank.op_names.codes] | stacks[rank.op_stacks] | modules[history.module]
    names = rank.storage_texts["name"]
    found: Bools = modules[history.owner] | has(names.distinct)[names.codes]
    made = history.created != NONE
    found[made] |= operators[history.created[made]]
    return found
