"""Lower bounds on the memory of any schedule of a step."""

from __future__ import annotations

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.trace.schema import NONE


def needed_bytes(graph: Graph) -> int:
    """Returns a lower bound on the peak of any schedule, however often operators run again.

    While an operator runs, its inputs, its outputs and the fixed memory are live. A value changed in place is counted
    once.
    """
    needed = graph.floor_bytes + graph.workspace_bytes
    np.add.at(needed, graph.value_op, np.where(graph.taken_from == NONE, graph.value_bytes, 0))
    np.add.at(needed, graph.read_op, graph.value_bytes[graph.read_value])
    return int(needed.max(initial=0))
