"""Optimizer settings that a search tries."""

from __future__ import annotations

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.base import Candidates
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.optimizer.recognise import recognise_updates
from memprof.trace.step import Step


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns updates within backward or of one parameter at a time, where the step has an optimizer.

    On a device, Adam and SGD can run as one kernel, faster and without temporaries, or keep their state on the host.
    """
    if not np.any(step.ops.phase == "optimizer"):
        return Candidates(unsuitable={OptimizerPolicy(in_backward=True): "No optimizer updates in this step."})
    if not step.targets_device() or not _has_forms(step):
        return Candidates((OptimizerPolicy(in_backward=True), OptimizerPolicy(loop="loop")))
    settings = [{"loop": "fused"}, {"state": "host"}]
    return Candidates(tuple(OptimizerPolicy(in_backward=early, **one) for early in (True, False) for one in settings))


def _has_forms(step: Step) -> bool:
    """Tells whether the updates are of an optimizer whose other forms are known."""
    try:
        return bool(recognise_updates(step).algorithm)
    except PolicyError:
        return False
