"""Optimizer settings that a search tries."""

from __future__ import annotations

import numpy as np

from memprof.policies.base import Candidates
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.trace.step import Step


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns updates within backward, and updates of one parameter at a time, where the step has an optimizer."""
    if not np.any(step.ops.phase == "optimizer"):
        return Candidates(unsuitable={OptimizerPolicy(in_backward=True): "No optimizer updates in this step."})
    return Candidates((OptimizerPolicy(in_backward=True), OptimizerPolicy(loop="loop")))
