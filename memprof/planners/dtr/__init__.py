"""Dynamic Tensor Rematerialization: run the step at a hard budget and, when it is full, evict what is worth least."""

from memprof.planners.dtr.planner import Dtr

__all__ = ["Dtr"]
