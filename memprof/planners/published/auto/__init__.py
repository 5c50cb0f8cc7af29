"""The product's own search: greedy first, then a growing exact model, then exchanges; with a bound on what is left."""

from memprof.planners.published.auto.planner import Auto

__all__ = ["Auto"]
