"""Optimizer settings that a search tries."""

from __future__ import annotations

import numpy as np

from memprof.policies.base import Candidates
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.trace.step import Step
from memprof.trace.usages import NEEDS_CLOSURE

#: Its fused form runs on a CPU only.
_ON_CPU = ("Adagrad",)


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns updates within backward or of one parameter at a time, where the step has an optimizer.

    Adam, SGD and Adagrad can run as one kernel, faster and without temporaries; on a device, the state of any optimizer
    that needs no closure can be kept on the host.
    """
    if not np.any(step.ops.phase == "optimizer"):
        return Candidates(unsuitable={OptimizerPolicy(in_backward=True): "no optimizer updates in this step."})
    alone = (OptimizerPolicy(in_backward=True), OptimizerPolicy(loop="loop"))
    known, on_device, both = step.optimizers, step.targets_device(), (True, False)
    fused, on_host = [], []
    is_known = bool(known) and not (on_device and any(each.name in _ON_CPU for each in known))
    if is_known and all(each.has_form("fused") for each in known):
        fused = [OptimizerPolicy(loop="fused", in_backward=early) for early in both]
    if on_device and known and not any(NEEDS_CLOSURE in each.words for each in known):
        on_host = [OptimizerPolicy(state="host", in_backward=early) for early in both]
    return Candidates((*fused, *(() if fused and on_device else alone), *on_host))
