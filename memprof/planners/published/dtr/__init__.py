"""Dynamic Tensor Rematerialization: run the step at a hard budget and, when it is full, evict what is worth least."""

from memprof.planners.published.dtr.planner import Dtr

__all__ = ["Dtr"]
