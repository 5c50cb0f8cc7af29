"""Gradients of gradients: backward operators that are differentiated in turn, as with ``create_graph=True``."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step


def differentiated_gradients(step: Step) -> Ints:
    """Returns the operators of backward that another backward runs through, by their ids in ascending order."""
    forward = step.ops.forward_op_id
    nodes = np.unique(forward[forward != NONE])
    found: Ints = nodes[step.ops.phase[nodes] == "backward"]
    return found
