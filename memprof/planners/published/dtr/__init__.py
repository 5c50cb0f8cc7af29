"""Dynamic Tensor Rematerialization: run the step under a hard memory cap and evict the cheapest values when full."""

from memprof.planners.published.dtr.planner import Dtr

__all__ = ["Dtr"]
