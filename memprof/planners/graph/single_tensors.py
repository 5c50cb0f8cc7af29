"""From a schedule of operators to a plan for individual saved tensors, as remat applies it."""

from __future__ import annotations

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.policies.evict.names import keys_of
from memprof.policies.remat.policy import Remat
from memprof.trace.schema import Ints
from memprof.trace.step import Step


def remat_of(step: Step, graph: Graph, runs: Ints, budget: str = "") -> Remat | None:
    """Returns the policy that drops what a schedule recomputes.

    A schedule also says when each value is dropped and how long it stays after recompute; the policy drops it as soon
    as nothing else holds it and recomputes it when backward needs it.

    Args:
        step: The step.
        graph: Its graph.
        runs: The schedule.
        budget: Budget to hold as a hard memory cap too, as text; "" for none.

    Returns:
        The policy; None where the schedule recomputes nothing that backward reads.
    """
    times = np.bincount(runs, minlength=graph.ops)
    is_again = (times[graph.value_op] > 1) & graph.is_saved()
    keys = keys_of(step)
    chosen = tuple(dict.fromkeys(keys[op_id] for op_id in graph.value_op[is_again].tolist() if keys[op_id]))
    return Remat(budget=budget, recompute=chosen) if chosen else None
