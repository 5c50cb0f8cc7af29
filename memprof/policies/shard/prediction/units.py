"""Divides a model into units whose parameters are gathered together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.policies.plan.patterns import match_modules, outermost
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step

#: Index of the unit of everything outside the others.
ROOT = 0


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a model; 0 is the root's.

    Attributes:
        count: Number of units.
        of_storage: Unit of each parameter and gradient; NONE for other storages. Shape (storages,).
        first_forward: First forward operator of each, NONE if it has none. Shape (units,).
        last_forward: Last forward operator.
        first_backward: First backward operator.
        last_backward: Last backward operator.
    """

    count: int
    of_storage: Ints
    first_forward: Ints
    last_forward: Ints
    first_backward: Ints
    last_backward: Ints


def find_units(step: Step, patterns: tuple[str, ...]) -> Units:
    """Finds the units, and when they run.

    Raises:
        PolicyError: A pattern matches no module.
    """
    modules, storages, ops, uses = step.modules, step.storages, step.ops, step.uses
    names = [str(name) for name in modules.name]
    chosen = choose_units(patterns, names, modules.type.tolist(), modules.parent_id.tolist())
    number_of = {name: number for number, name in enumerate(chosen, start=1)}
    of_module = np.full(len(modules) + 1, ROOT, dtype=np.int64)  # the last entry is for operators outside of modules
    for row, (name, parent) in enumerate(zip(names, modules.parent_id.tolist(), strict=True)):
        of_module[row] = number_of.get(name, of_module[parent] if parent != NONE else ROOT)
    count = len(number_of) + 1

    is_owned = np.isin(storages.category, ("parameter", "gradient"))
    of_storage = np.where(is_owned, of_module[storages.module_id], NONE)
    # A unit runs where its modules run, and where others use its weights.
    used = np.flatnonzero(storages.category[uses.storage_id] == "parameter")
    op = np.concatenate([np.arange(len(ops)), uses.op_id[used]])
    unit = np.concatenate([of_module[ops.module_id], of_storage[uses.storage_id[used]]])
    # Operators outside of modules (the loss) do not belong to the root.
    is_known = np.concatenate([ops.module_id != NONE, np.ones(len(used), dtype=np.bool_)])
    spans = []
    for phase in ("forward", "backward"):
        inside = is_known & (ops.phase[op] == phase) & (unit != NONE)
        first = np.full(count, len(ops), dtype=np.int64)
        last = np.full(count, NONE, dtype=np.int64)
        np.minimum.at(first, unit[inside], op[inside])
        np.maximum.at(last, unit[inside], op[inside])
        # The root runs as long as anything in it does.
        first[ROOT], last[ROOT] = first.min(), last.max()
        spans += [np.where(last == NONE, NONE, first), last]
    return Units(count, of_storage, *spans)


def choose_units(
    patterns: tuple[str, ...], names: Sequence[str], types: Sequence[str], parents: Sequence[int]
) -> list[str]:
    """Returns the units of a model, none nested in another, without the root's own, "".

    Args:
        patterns: Patterns of the modules; if empty, the layers: the outermost modules numbered in a list or a sequence,
            except single operations such as ReLU in a sequence.
        names: Names of all modules.
        types: Their types.
        parents: Row of each module's parent, -1 for a root.

    Raises:
        PolicyError: A pattern matches no module.
    """
    if patterns:
        return [name for name in outermost(match_modules(patterns, names)) if name]
    has_children = {parent for parent in parents if parent >= 0}
    return outermost(
        [
            name
            for row, (name, kind, parent) in enumerate(zip(names, types, parents, strict=True))
            if name.rpartition(".")[2].isdigit()
            and kind != "ModuleList"
            and (row in has_children or (parent >= 0 and types[parent] == "ModuleList"))
        ]
    )
