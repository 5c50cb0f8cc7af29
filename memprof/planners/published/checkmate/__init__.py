"""Exact schedules by mixed-integer programming (Checkmate)."""

from memprof.planners.published.checkmate.planner import Checkmate

__all__ = ["Checkmate"]
