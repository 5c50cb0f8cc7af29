"""Finds the models of a step that a plan applies to: those that are trained, whatever wraps the called module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.runtime.model_roots import root_of, trained_roots
from memprof.trace.schema import NONE, Bools

if TYPE_CHECKING:
    from memprof.trace.step import Step


def is_trained_root(step: Step) -> Bools:
    """Returns which modules are roots of trained models; a plan leaves the others (frozen models) unchanged.

    A model that this step only evaluates is trained in another recorded one.

    Raises:
        PolicyError: No model is trained.
    """
    is_trained = trained_roots(step)
    if not is_trained.any():
        raise PolicyError("precision: the recording trains no model: it has no gradient of a parameter.")
    return is_trained


def of_trained_models(step: Step) -> Bools:
    """Returns which storages do not belong to a frozen model, to which no plan applies; ``(storages,)``."""
    is_trained = np.append(is_trained_root(step)[root_of(step)], True)  # NONE is the last
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
