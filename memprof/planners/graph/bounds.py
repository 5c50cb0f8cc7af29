"""What no schedule of a step can do without."""

from __future__ import annotations

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.trace.schema import NONE


def needed_bytes(graph: Graph) -> int:
    """Returns the bytes below which no schedule fits, however often it runs operators again.

    While an operator runs, what it reads and what it makes is alive, and what is alive whatever is planned. A value
    that it changes in place is counted once.
    """
    needed = graph.floor_bytes + graph.workspace_bytes
    np.add.at(needed, graph.value_op, np.where(graph.taken_from == NONE, graph.value_bytes, 0))
    np.add.at(needed, graph.read_op, graph.value_bytes[graph.read_value])
    return int(needed.max(initial=0))
