"""Modules that are chosen together: repeated ones, or single ones, and what they save for backward."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from memprof.policies.runtime.model_names import module_names
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step

#: Maximum number of groups, by saved bytes: more make the search longer and the plan no better.
MOST_GROUPS = 12
#: Groups that free less than this share of the step's saved bytes are ignored.
LEAST_SHARE = 0.005


@dataclass(frozen=True)
class Group:
    """Modules of one kind: ``layers.0`` to ``layers.11``, or ``head`` alone.

    Attributes:
        pattern: Their common name: ``layers.*``.
        members: Their qualified names, lowest recompute cost per saved byte first.
        saved_bytes: Bytes made in all of them and saved only for their own backward.
        forward_us: Duration of their forwards, in microseconds.
        calls: Operators of the first call of each member.
        is_whole: Whether the pattern matches all members and nothing else.
    """

    pattern: str
    members: tuple[str, ...]
    saved_bytes: int
    forward_us: float
    calls: tuple[range, ...]
    is_whole: bool

    def pattern_for(self, names: Collection[str]) -> tuple[str, ...]:
        """Returns what selects some members: the pattern where it is all of them."""
        if self.is_whole and len(names) == len(self.members):
            return (self.pattern,)
        return tuple(name for name in self.members if name in names)


def around(name: str) -> set[str]:
    """Returns a module's name and those of all modules around it, except the model itself."""
    return {name, *(name[:place] for place, letter in enumerate(name) if letter == ".")}


def are_apart(names: Collection[str], others: Collection[str]) -> bool:
    """Returns whether no module of one collection is one of the other, nor inside or around one."""
    covered = set().union(*map(around, others))
    return not any(name in covered or not around(name).isdisjoint(others) for name in names)


def find_groups(step: Step, *, with_inputs: bool = False) -> list[Group]:
    """Finds the groups of a step, most saved bytes first.

    Modules whose names differ only in numbers form a group, if numbered siblings are of one type. Modules that run the
    same operators as their parent, or free next to nothing, are left out.

    Args:
        step: The recorded step.
        with_inputs: Count everything that a module saves, also what others made, instead of what it makes and saves.
    """
    names = module_names(step)
    calls = step.module_calls
    rows = np.flatnonzero(~calls.is_recompute & (calls.first_op_id != NONE) & (calls.last_op_id != NONE))
    rows = rows[step.modules.parent_id[calls.module_id[rows]] != NONE]
    made, last_kept, kept_bytes = _saved(step, with_inputs=with_inputs)
    cost = np.concatenate(([0.0], np.cumsum(np.nan_to_num(step.ops.duration_us))))
    by_module: dict[int, list[int]] = {}
    for row in rows.tolist():
        by_module.setdefault(int(calls.module_id[row]), []).append(row)

    spans: dict[int, tuple[int, float]] = {}
    calls_of: dict[int, range] = {}
    seen: set[tuple[tuple[int, int], ...]] = set()
    for module, own in by_module.items():  # in order of first call, so that parents come before children
        span = tuple((int(calls.first_op_id[row]), int(calls.last_op_id[row]) + 1) for row in own)
        size = sum(_bytes_inside(made, last_kept, kept_bytes, begin, end) for begin, end in span)
        # Of modules that run the same operators, the outermost counts.
        if span in seen or not size:
            continue
        seen.add(span)
        spans[module] = (size, sum(float(cost[end] - cost[begin]) for begin, end in span))
        calls_of[module] = range(*span[0])

    shapes = _shapes(step, names)
    grouped: dict[str, list[int]] = {}
    for module in spans:
        grouped.setdefault(shapes[module], []).append(module)
    groups = [_group(pattern, modules, names, spans, calls_of) for pattern, modules in grouped.items()]
    least = LEAST_SHARE * float(kept_bytes.sum())
    groups = [group for group in groups if group.saved_bytes >= least]
    return sorted(groups, key=lambda group: -group.saved_bytes)[:MOST_GROUPS]


def _shapes(step: Step, names: Sequence[str]) -> list[str]:
    """Returns each module's name with ``*`` for numbers that only enumerate modules of one type."""
    types: dict[int, set[str]] = {}
    for module, parent in enumerate(step.modules.parent_id.tolist()):
        types.setdefault(parent, set()).add(str(step.modules.type[module]))
    shapes: dict[int, str] = {}

    def shape_of(module: int) -> str:
        # A module may precede its parent: a job may wrap what it made.
        if module not in shapes:
            parent = int(step.modules.parent_id[module])
            own = names[module].rpartition(".")[2]
            counts = own.isdigit() and len(types[parent]) == 1
            above = shape_of(parent) if parent != NONE else ""
            shapes[module] = f"{above}.{'*' if counts else own}" if above else ("*" if counts else names[module])
        return shapes[module]

    return [shape_of(module) for module in range(len(step.modules))]


def _group(
    pattern: str,
    modules: list[int],
    names: Sequence[str],
    spans: dict[int, tuple[int, float]],
    calls_of: dict[int, range],
) -> Group:
    sizes = {spans[module][0] for module in modules}
    if len(sizes) > 1:
        modules = sorted(modules, key=lambda module: spans[module][1] / spans[module][0])
    members = tuple(names[module] for module in modules)
    everything = {name for name in names if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name)}
    return Group(
        pattern=pattern,
        members=members,
        saved_bytes=sum(spans[module][0] for module in modules),
        forward_us=sum(spans[module][1] for module in modules),
        calls=tuple(calls_of[module] for module in modules),
        is_whole=set(members) == everything and len(members) > 1,
    )


def _bytes_inside(made: Ints, last_kept: Ints, kept_bytes: Ints, begin: int, end: int) -> int:
    """Sums the bytes made and saved by operators from ``begin`` to before ``end``: what rerunning them frees."""
    low, high = np.searchsorted(made, (begin, end))
    return int(kept_bytes[low:high][last_kept[low:high] < end].sum())


def _saved(step: Step, *, with_inputs: bool) -> tuple[Ints, Ints, Ints]:
    """Finds what forward makes and saves for its own backward, or what each of its operators saves.

    Returns:
        For each such storage, the operator that makes it, or the last one that saves it; the last one that saves it;
        and its bytes; ordered by the first.
    """
    storages, saved = step.storages, step.saved
    last = np.full(len(storages), NONE)
    np.maximum.at(last, saved.storage_id, saved.forward_op_id)
    is_own = (storages.created_op_id != NONE) & np.isin(storages.category, ("activation", "temporary"))
    rows = np.flatnonzero(is_own & (last != NONE))
    if with_inputs:
        rows = rows[np.argsort(last[rows], kind="stable")]
    return (last if with_inputs else storages.created_op_id)[rows], last[rows], storages.allocated_bytes[rows]
