"""Divides a model into units whose parameters are gathered at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.policies.patterns import match_modules, outermost
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step

#: Number of the unit of all that is in no other.
ROOT = 0


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a model, 0 being the root's.

    Attributes:
        count: How many there are.
        of_storage: Unit of each parameter and gradient; NONE for other storages. Shape (storages,).
        first_forward: First forward operator of each, NONE without. Shape (units,).
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
    """Finds the units, and when they are at work.

    Raises:
        PolicyError: A pattern matches no module.
    """
    modules, storages, ops, uses = step.modules, step.storages, step.ops, step.uses
    names = [str(name) for name in modules.name]
    chosen = outermost(match_modules(patterns, names)) if patterns else _layers(step, names)
    number_of = {name: number for number, name in enumerate((name for name in chosen if name), start=1)}
    of_module = np.full(len(modules) + 1, ROOT, dtype=np.int64)  # the last is that of what is outside of modules
    for row, (name, parent) in enumerate(zip(names, modules.parent_id.tolist(), strict=True)):
        of_module[row] = number_of.get(name, of_module[parent] if parent != NONE else ROOT)
    count = len(number_of) + 1

    is_owned = np.isin(storages.category, ("parameter", "gradient"))
    of_storage = np.where(is_owned, of_module[storages.module_id], NONE)
    # A unit is at work where its modules are, and where others use its weights.
    used = np.flatnonzero(storages.category[uses.storage_id] == "parameter")
    op = np.concatenate([np.arange(len(ops)), uses.op_id[used]])
    unit = np.concatenate([of_module[ops.module_id], of_storage[uses.storage_id[used]]])
    # What no module runs (the loss) is no work of the root's.
    is_known = np.concatenate([ops.module_id != NONE, np.ones(len(used), dtype=np.bool_)])
    spans = []
    for phase in ("forward", "backward"):
        inside = is_known & (ops.phase[op] == phase) & (unit != NONE)
        first = np.full(count, len(ops), dtype=np.int64)
        last = np.full(count, NONE, dtype=np.int64)
        np.minimum.at(first, unit[inside], op[inside])
        np.maximum.at(last, unit[inside], op[inside])
        spans += [np.where(last == NONE, NONE, first), last]
    return Units(count, of_storage, *spans)


def _layers(step: Step, names: list[str]) -> list[str]:
    """Returns the modules that are numbered in a list, the outermost; a single operation such as ReLU is none."""
    modules = step.modules
    has_children = np.zeros(len(modules) + 1, dtype=np.bool_)
    has_children[modules.parent_id] = True
    is_list = np.append(modules.type == "ModuleList", False)
    layers = [
        name
        for row, name in enumerate(names)
        if name.rpartition(".")[2].isdigit()
        and modules.type[row] != "ModuleList"
        and (has_children[row] or is_list[modules.parent_id[row]])
    ]
    return outermost(layers)
