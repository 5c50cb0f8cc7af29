"""Swap settings that a search tries apart from activations, for which it chooses modules."""

from __future__ import annotations

import numpy as np

from memprof.policies.base import Candidates
from memprof.policies.runtime.model_names import module_names
from memprof.policies.swap.policy import Swap
from memprof.trace.schema import NONE
from memprof.trace.step import Step


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns swapping of optimizer state, where there is any."""
    state = Swap(what="optimizer", to="host" if step.is_on_device() else "disk")
    if not np.any(step.storages.category == "optimizer_state"):
        return Candidates(unsuitable={state: "No optimizer keeps any state between steps."})
    return Candidates((state,))


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
