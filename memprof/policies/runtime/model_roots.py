"""The models of a job: each root module, and its submodules."""

from __future__ import annotations

import numpy as np

from memprof.trace.kept import kept
from memprof.trace.schema import NONE, Bools, Ints, Modules
from memprof.trace.step import Step, sum_at


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
