"""memprof's own search: greedy, then a growing exact model, then local search, with a bound on the remaining gap."""

from memprof.planners.published.auto.planner import Auto

__all__ = ["Auto"]
