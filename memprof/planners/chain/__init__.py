"""Optimal schedules for chains of stages (rotor)."""

from memprof.planners.chain.planner import Chain

__all__ = ["Chain"]
