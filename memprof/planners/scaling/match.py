"""Matches the operators and storages of two steps of one job, recorded at different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from memprof.errors import InconclusiveError
from memprof.trace.schema import NONE, Bools, Ints, is_beside
from memprof.trace.step import Step

#: Above this product of operator counts, loading is matched only from its ends.
_MOST_PAIRS = 4_000_000


@dataclass(frozen=True, eq=False)
class Match:
    """The common operators and storages of several steps, one row per step.

    Attributes:
        ops: Rows of the operators, shape ``(steps, matched operators)``, in order.
        storages: Rows of the storages, shape ``(steps, matched storages)``.
    """

    ops: Ints
    storages: Ints


def match_steps(steps: Sequence[Step], names: Sequence[str]) -> Match:
    """Matches operators one to one, in order, and storages by the operators that make, use and free them.

    Only loading may differ: outside forward, backward and optimizer, a loop over the samples of a batch runs once per
    sample. Its surplus operators stay unmatched.

    Args:
        steps: Two or more steps.
        names: Name of each in messages, such as ``batch 4``.

    Raises:
        InconclusiveError: The steps run different operators, or different storages are live in them.
    """
    ops = _matched_ops(steps[0], steps[1], names[:2])
    for number in range(2, len(steps)):
        more = _matched_ops(steps[0], steps[number], (names[0], names[number]))
        # Rows of the first step that all the others have.
        common, left, right = np.intersect1d(ops[0], more[0], return_indices=True)
        ops = np.concatenate([np.concatenate([common[None], ops[1:, left]]), more[1:, right]])
    signatures = [_Signatures(step, rows) for step, rows in zip(steps, ops, strict=True)]
    storages = _matched_storages(signatures, names)
    return Match(ops=ops, storages=storages)


def group_alike(steps: Sequence[Step]) -> list[list[int]]:
    """Groups steps that run the same operators outside of loading; returns the indices of each group's steps."""
    codes: dict[tuple[str, ...], int] = {}
    groups: dict[bytes, list[int]] = {}
    for place, step in enumerate(steps):
        groups.setdefault(_op_keys(step, codes)[~_is_loading(step)].tobytes(), []).append(place)
    return list(groups.values())


def _matched_ops(first: Step, second: Step, names: Sequence[str]) -> Ints:
    """Returns the rows of matching operators of two steps, shape ``(2, matched)``."""
    codes: dict[tuple[str, ...], int] = {}
    keys = [_op_keys(step, codes) for step in (first, second)]
    cores = [np.flatnonzero(~_is_loading(step)) for step in (first, second)]
    core_keys = [key[core] for key, core in zip(keys, cores, strict=True)]
    if not np.array_equal(core_keys[0], core_keys[1]):
        raise InconclusiveError(_difference((first, second), cores, core_keys, names))
    matched = [np.stack(cores)]
    # Loading between two core operators: a loop in it is longer in one than in the other.
    edges = [np.concatenate([[NONE], core, [len(key)]]) for core, key in zip(cores, keys, strict=True)]
    gaps = np.flatnonzero((np.diff(edges[0]) > 1) & (np.diff(edges[1]) > 1))
    for gap in gaps.tolist():
        spans = [np.arange(edge[gap] + 1, edge[gap + 1]) for edge in edges]
        matched.append(_ends(spans[0], spans[1], keys[0], keys[1]))
    rows = np.concatenate(matched, axis=1)
    order: Ints = rows[:, np.argsort(rows[0])]
    return order


def _is_loading(step: Step) -> Bools:
    loading: Bools = is_beside(step.ops.phase) & (step.ops.module_id == NONE)
    return loading


def _op_keys(step: Step, codes: dict[tuple[str, ...], int]) -> Ints:
    """Numbers operators by identity across steps; modules by name, since ids may differ."""
    ops, modules = step.ops, step.modules
    places = [f"{name} {kind}" for name, kind in zip(modules.name, modules.type, strict=True)] + [""]
    keys = zip(ops.phase, ops.name, (places[row] for row in ops.module_id.tolist()), strict=True)
    return np.array([codes.setdefault(key, len(codes)) for key in keys], dtype=np.int64)


def _ends(first: Ints, second: Ints, first_keys: Ints, second_keys: Ints) -> Ints:
    """Matches two operator sequences from the front as far as they agree, then from the back, then in between."""
    count = min(len(first), len(second))
    same = first_keys[first[:count]] == second_keys[second[:count]]
    front = count if same.all() else int(np.argmin(same))
    rest = count - front
    same = first_keys[first[len(first) - rest :]][::-1] == second_keys[second[len(second) - rest :]][::-1]
    back = rest if same.all() else int(np.argmin(same))
    between = [span[front : len(span) - back] for span in (first, second)]
    middle = _common(between[0], between[1], first_keys, second_keys)
    return np.stack(
        [
            np.concatenate([span[:front], middle[side], span[len(span) - back :]])
            for side, span in enumerate((first, second))
        ]
    )


def _common(first: Ints, second: Ints, first_keys: Ints, second_keys: Ints) -> Ints:
    """Matches the common subsequence of two operator sequences, such as loops over samples and their collation."""
    if not len(first) or not len(second) or len(first) * len(second) > _MOST_PAIRS:
        return np.empty((2, 0), dtype=np.int64)
    matcher = SequenceMatcher(None, first_keys[first].tolist(), second_keys[second].tolist(), autojunk=False)
    blocks = [block for block in matcher.get_matching_blocks() if block.size]
    rows = [
        np.concatenate([run[start : start + block.size] for block, start in zip(blocks, starts, strict=True)])
        if blocks
        else np.empty(0, dtype=np.int64)
        for run, starts in ((first, [b.a for b in blocks]), (second, [b.b for b in blocks]))
    ]
    return np.stack(rows)


def _difference(steps: Sequence[Step], cores: Sequence[Ints], keys: Sequence[Ints], names: Sequence[str]) -> str:
    count = min(map(len, keys))
    same = keys[0][:count] == keys[1][:count]
    place = count if same.all() else int(np.argmin(same))
    parts = []
    for step, core, name in zip(steps, cores, names, strict=True):
        if place == len(core):
            parts.append(f"{name} has ended")
            continue
        row = int(core[place])
        module = int(step.ops.module_id[row])
        where = f" of {step.modules.name[module] or step.modules.type[module]}" if module != NONE else ""
        parts.append(f"{name} runs {step.ops.name[row]} ({step.ops.phase[row]}{where})")
    return (
        f"the steps do not run the same operators, so other sizes cannot be predicted: after "
        f"{place} operators, {parts[0]} and {parts[1]}. Record the same steps of the same job, at different sizes."
    )


class _Signatures:
    """Signatures that identify a step's storages, in positions of the matched operators."""

    def __init__(self, step: Step, rows: Ints) -> None:
        self.step = step
        storages, uses = step.storages, step.uses
        is_matched = np.zeros(len(step.ops) + 1, dtype=np.bool_)
        is_matched[rows] = True
        is_matched[-1] = True  # the last entry is NONE: live from the start
        position = np.searchsorted(rows, np.arange(len(step.ops)), side="right") - 1
        position = np.append(position, NONE)
        first, last = np.full(len(storages), len(rows)), np.full(len(storages), NONE)
        known = is_matched[uses.op_id]
        np.minimum.at(first, uses.storage_id[known], position[uses.op_id[known]])
        np.maximum.at(last, uses.storage_id[known], position[uses.op_id[known]])
        self.candidates = np.flatnonzero(is_matched[storages.created_op_id])
        #: Made by unmatched loading, but read by the model.
        in_model = uses.storage_id[~_is_loading(step)[uses.op_id]]
        self.strays = np.intersect1d(np.flatnonzero(~is_matched[storages.created_op_id]), in_model)
        self.made = position[storages.created_op_id]
        self.is_used = last != NONE
        freed = np.where(storages.freed_op_id == NONE, len(rows), position[storages.freed_op_id])
        self.text = list(
            zip(
                self.made.tolist(),
                storages.category.tolist(),
                storages.name.tolist(),
                storages.dtype.tolist(),
                freed.tolist(),
                first.tolist(),
                last.tolist(),
                strict=True,
            )
        )

    def describe(self, row: int) -> str:
        """Describes a storage in a message."""
        storages = self.step.storages
        made = int(storages.created_op_id[row])
        maker = f"made by {self.step.ops.name[made]}" if made != NONE else "live when the step begins"
        shape = f" {storages.shape[row]}" if storages.shape[row] else ""
        return f"a {storages.category[row]}{shape} of {storages.requested_bytes[row]} bytes {maker}"


def _matched_storages(signatures: Sequence[_Signatures], names: Sequence[str]) -> Ints:
    """Matches storages of the same signature; among several, by size."""
    groups = [_grouped(each, len(signatures[0].text[0]) if each.text else 0) for each in signatures]
    matched, left = _pair(signatures, groups)
    # The rest may differ in category or end in one of the steps: match these by maker only.
    loose = [
        _grouped(each, 1, np.array(sorted(rest), dtype=np.int64)) for each, rest in zip(signatures, left, strict=True)
    ]
    more, left = _pair(signatures, loose)
    for each, rest, name in zip(signatures, left, names, strict=True):
        for row in sorted(rest.union(each.strays.tolist())):
            # An older tensor that the step does not touch, such as the data set, is ignored.
            if each.made[row] != NONE or each.is_used[row]:
                raise InconclusiveError(
                    f"the steps do not hold the same tensors, so other sizes cannot be predicted: {name} has "
                    f"{each.describe(row)} without a match in the others."
                )
    return np.concatenate([matched, more], axis=1)


def _grouped(each: _Signatures, width: int, rows: Ints | None = None) -> dict[tuple[object, ...], list[int]]:
    """Collects the rows of each signature, fewest bytes first."""
    rows = each.candidates if rows is None else rows
    size = each.step.storages.requested_bytes
    groups: dict[tuple[object, ...], list[int]] = {}
    for row in rows[np.argsort(size[rows], kind="stable")].tolist():
        groups.setdefault(each.text[row][:width], []).append(row)
    return groups


def _pair(
    signatures: Sequence[_Signatures], groups: Sequence[dict[tuple[object, ...], list[int]]]
) -> tuple[Ints, list[set[int]]]:
    """Pairs the groups of equal size in all steps; returns the rows, and those left over of each step."""
    left = [{row for rows in each.values() for row in rows} for each in groups]
    columns: list[list[int]] = [[] for _ in signatures]
    for key, rows in groups[0].items():
        others = [each.get(key, []) for each in groups]
        if any(len(other) != len(rows) for other in others):
            continue
        for column, rest, other in zip(columns, left, others, strict=True):
            column.extend(other)
            rest.difference_update(other)
    return np.array(columns, dtype=np.int64).reshape(len(signatures), -1), left
