"""Optimizer settings that a search tries."""

from __future__ import annotations

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.base import Candidates
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.optimizer.recognise import recognise_updates
from memprof.trace.step import Step

#: Algorithms whose fused form is proposed for a device, and for the CPU.
_FUSED, _FUSED_ON_CPU = ("adam", "sgd"), ("adam", "sgd", "adagrad")


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns updates within backward or of one parameter at a time, where the step has an optimizer.

    Adam, SGD and Adagrad can run as one kernel, faster and without temporaries, but on the CPU not with swapped state;
    on a device, the state of these and RMSprop can be kept on the host.
    """
    if not np.any(step.ops.phase == "optimizer"):
        return Candidates(unsuitable={OptimizerPolicy(in_backward=True): "No optimizer updates in this step."})
    alone = (OptimizerPolicy(in_backward=True), OptimizerPolicy(loop="loop"))
    kind, on_device, both = _algorithm(step), step.targets_device(), (True, False)
    fused, on_host = [], []
    if kind in (_FUSED if on_device else _FUSED_ON_CPU) and all(each.has_form("fused") for each in step.optimizers):
        fused = [OptimizerPolicy(loop="fused", in_backward=early) for early in both]
    if kind and on_device:
        on_host = [OptimizerPolicy(state="host", in_backward=early) for early in both]
    return Candidates((*fused, *(() if fused and on_device else alone), *on_host))


def _algorithm(step: Step) -> str:
    """Returns the optimizer's algorithm, "" where its other forms are unknown."""
    try:
        return recognise_updates(step).algorithm
    except PolicyError:
        return ""
