"""Optimizer settings that a search tries."""

from __future__ import annotations

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.base import Candidates
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.optimizer.recognise import recognise_updates
from memprof.trace.step import Step

#: Algorithms whose fused form is proposed for a device.
_FUSED = ("adam", "sgd")


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns updates within backward or of one parameter at a time, where the step has an optimizer.

    On a device, Adam and SGD can run as one kernel, faster and without temporaries; the state of these, RMSprop and
    Adagrad can be kept on the host.
    """
    if not np.any(step.ops.phase == "optimizer"):
        return Candidates(unsuitable={OptimizerPolicy(in_backward=True): "No optimizer updates in this step."})
    alone = (OptimizerPolicy(in_backward=True), OptimizerPolicy(loop="loop"))
    kind = _algorithm(step) if step.targets_device() else ""
    if not kind:
        return Candidates(alone)
    on_host = [OptimizerPolicy(state="host", in_backward=early) for early in (True, False)]
    if kind not in _FUSED:
        return Candidates((*alone, *on_host))
    return Candidates((*(OptimizerPolicy(loop="fused", in_backward=early) for early in (True, False)), *on_host))


def _algorithm(step: Step) -> str:
    """Returns the optimizer's algorithm, "" where its other forms are unknown."""
    try:
        return recognise_updates(step).algorithm
    except PolicyError:
        return ""
