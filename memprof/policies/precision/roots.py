"""Finds the models of a step that a plan applies to: those that are trained, whatever wraps the called module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.trace.schema import NONE, Bools, Ints

if TYPE_CHECKING:
    from memprof.trace.step import Step


def root_of_modules(step: Step) -> Ints:
    """Returns the root of each module, ``(modules,)``."""
    modules = step.modules
    root_of = modules.module_id.copy()
    for _ in range(len(modules)):
        parents = modules.parent_id[root_of] if len(root_of) else root_of
        if not np.any(parents != NONE):
            break
        root_of = np.where(parents != NONE, parents, root_of)
    return root_of


def is_trained_root(step: Step, root_of: Ints) -> Bools:
    """Returns which modules are roots of trained models; a plan leaves the others (frozen models) unchanged.

    A model that this step only evaluates is trained in another recorded one.

    Raises:
        PolicyError: No model is trained.
    """
    storages = step.storages
    is_trained = np.zeros(len(step.modules), dtype=np.bool_)
    owners = storages.module_id[(storages.category == "gradient") & (storages.module_id != NONE)]
    is_trained[root_of[owners]] = True
    is_trained[root_of[list(step.trained_modules)]] = True
    if not is_trained.any():
        raise PolicyError("precision: the recording trains no model: it has no gradient of a parameter.")
    return is_trained


def of_trained_models(step: Step) -> Bools:
    """Returns which storages do not belong to a frozen model, to which no plan applies; ``(storages,)``."""
    root_of = root_of_modules(step)
    is_trained = np.append(is_trained_root(step, root_of)[root_of], True)  # NONE is the last
    of_trained: Bools = is_trained[step.storages.module_id]
    return of_trained


def holds_parameters(step: Step) -> Bools:
    """Returns which modules have parameters, directly or in a submodule, ``(modules,)``."""
    modules = step.modules
    holds = modules.parameter_bytes > 0
    inside = np.flatnonzero(holds)
    while len(inside):
        parents = modules.parent_id[inside]
        inside = np.unique(parents[parents != NONE])
        inside = inside[~holds[inside]]
        holds[inside] = True
    return holds
