"""Swap settings that a search tries apart from activations, for which it chooses modules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memprof.policies.base import Candidates
from memprof.policies.swap.policy import Swap
from memprof.trace.step import Step


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns swapping of optimizer state, where there is any: for all updates at once, and one parameter at a time.

    On a device the optimizer policy keeps the state in host memory for one parameter at a time.
    """
    state = Swap(what="optimizer", to="host" if step.targets_device() else "disk")
    if not np.any(step.storages.category == "optimizer_state"):
        return Candidates(unsuitable={state: "no optimizer keeps any state between steps."})
    return Candidates((state,) if step.targets_device() else (state, replace(state, one_by_one=True)))
