"""The models of a job, torch's modules that wrap a whole one, and names of modules within their own model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from memprof.policies.plan.patterns import match_modules
from memprof.trace.kept import kept
from memprof.trace.schema import NONE, Bools, Ints, Modules
from memprof.trace.step import Step, sum_at

#: Types of wrappers, and where they keep the model.
WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


def module_names(step: Step) -> list[str]:
    """Returns qualified names as each model's own named_modules() has them: a root is "".

    In a job with several models the trace puts the root's type in front.

    Returns:
        One name for each row of ``step.modules``.
    """
    return _names_within(step.modules).copy()


@kept
def _names_within(modules: Modules) -> list[str]:
    roots = [str(name) for name in modules.name[modules.parent_id == NONE] if name]
    names = []
    for parent, name in zip(modules.parent_id, modules.name, strict=True):
        root = next((root for root in roots if str(name).startswith(root + ".")), "")
        names.append("" if parent == NONE else str(name).removeprefix(root + "."))
    return names


def chosen_modules(step: Step, patterns: Sequence[str]) -> Bools:
    """Marks the modules that patterns choose in a step, as they choose them in the job.

    A pattern matches names within a model, or names prefixed with the model's type as in the trace. Models without
    parameters, such as losses, are never chosen.

    Returns:
        One value for each row of ``step.modules``.

    Raises:
        PolicyError: A pattern matches nothing.
    """
    return _chosen_modules(step.modules, tuple(patterns)).copy()


@kept
def _chosen_modules(modules: Modules, patterns: tuple[str, ...]) -> Bools:
    root, size = roots_of(modules), parameter_bytes_by_root(modules)
    is_trained = size[root] > 0 if size.any() else np.ones(len(modules), dtype=np.bool_)
    own, full = np.array(_names_within(modules), dtype=np.object_), modules.name
    is_wrapped = np.isin(modules.type[root], list(WRAPPERS)) & (own != "")
    inside = np.array([without_wrappers(name) if wraps else name for name, wraps in zip(own, is_wrapped, strict=True)])
    # The wrapper itself is already named "".
    inside = np.where(inside == ".", own, inside).astype(np.object_)
    # Wildcards do not match a root's type.
    is_named = (modules.parent_id != NONE) | np.isin(full, list(patterns))
    known = [*own[is_trained], *inside[is_trained], *full[is_trained & is_named]]
    chosen = match_modules(patterns, dict.fromkeys(map(str, known)))
    marked: Bools = is_trained & (np.isin(own, chosen) | np.isin(inside, chosen) | (is_named & np.isin(full, chosen)))
    return marked


def with_children(step: Step, is_chosen: Bools) -> Bools:
    """Marks the chosen modules and all modules inside them, shape ``(modules,)``."""
    is_inside = is_chosen.copy()
    for row, parent in enumerate(step.modules.parent_id.tolist()):  # parents precede their children
        is_inside[row] |= parent != NONE and is_inside[parent]
    return is_inside


def modules_with_state(step: Step, minimum_bytes: int) -> list[str]:
    """Returns the names of modules by the optimizer state of their own parameters, most first.

    Args:
        step: The step.
        minimum_bytes: Modules with less are left out, and so is a root, whose name would choose all of its modules.
    """
    storages, names = step.storages, module_names(step)
    is_state = (storages.category == "optimizer_state") & (storages.module_id != NONE)
    size = np.zeros(len(names), dtype=np.int64)
    np.add.at(size, storages.module_id[is_state], storages.requested_bytes[is_state])
    largest = np.argsort(-size, kind="stable").tolist()
    return [names[row] for row in largest if size[row] >= minimum_bytes and names[row]]


def root_of(step: Step) -> Ints:
    """Returns the root module of each module, itself for a root, shape ``(modules,)``."""
    return roots_of(step.modules).copy()


@kept
def roots_of(modules: Modules) -> Ints:
    """Returns the same for a table of modules; not to be changed."""
    root = np.arange(len(modules))
    for row, parent in enumerate(modules.parent_id.tolist()):  # parents come before their children
        root[row] = row if parent == NONE else root[parent]
    return root


def parameter_bytes_by_root(modules: Modules) -> Ints:
    """Returns the bytes of the parameters of each root and everything in it, 0 for other modules."""
    return sum_at(roots_of(modules), modules.parameter_bytes, len(modules))


def trained_roots(step: Step) -> Bools:
    """Returns which modules are roots of models that a step trains, or another recorded one; shape ``(modules,)``."""
    storages, root = step.storages, root_of(step)
    is_trained = np.zeros(len(step.modules), dtype=np.bool_)
    owners = storages.module_id[(storages.category == "gradient") & (storages.module_id != NONE)]
    is_trained[root[owners]] = True
    is_trained[root[list(step.trained_modules)]] = True
    if not is_trained.any():  # torch.func.functional_call computes with tensors in the place of its parameters
        in_backward = step.ops.module_id[(step.ops.phase == "backward") & (step.ops.module_id != NONE)]
        used = np.unique(step.uses.storage_id)
        used = used[(storages.category[used] == "parameter") & (storages.module_id[used] != NONE)]
        is_trained[root[in_backward]] = True
        is_trained[root[storages.module_id[used]]] = False
    return is_trained


def unwrapped(model: Any) -> Any:
    """Returns the model inside DistributedDataParallel, DataParallel and torch.compile's OptimizedModule."""
    *_, inside = _layers(model)
    return inside


def is_compiled_as_whole(model: Any) -> bool:
    """Returns whether one of the wrappers around a model is torch.compile's."""
    *wrappers, _ = _layers(model)
    return any(type(wrapper).__name__ == "OptimizedModule" for wrapper in wrappers)


def _layers(model: Any) -> Iterator[Any]:
    """Yields the wrappers around a model, outermost first, and then the model."""
    while type(model).__module__.startswith("torch.") and type(model).__name__ in WRAPPERS:
        yield model
        model = getattr(model, WRAPPERS[type(model).__name__])
    yield model


def without_wrappers(name: str) -> str:
    """Returns a name, or a pattern of names, as the model inside has it."""
    while name.startswith(tuple(f"{place}." for place in WRAPPERS.values())):
        name = name.partition(".")[2]
    return "." if name in WRAPPERS.values() else name
