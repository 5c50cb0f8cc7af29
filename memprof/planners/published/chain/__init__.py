"""Optimal schedules for chains of stages (rotor)."""

from memprof.planners.published.chain.planner import Chain

__all__ = ["Chain"]
