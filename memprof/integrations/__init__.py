"""memprof inside other libraries' training loops and notebooks, and its metrics for experiment trackers."""

from memprof.integrations.figures import summary

__all__ = ["summary"]
