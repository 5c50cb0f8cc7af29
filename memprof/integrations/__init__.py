"""memprof inside other libraries' training loops and notebooks, and its figures for their experiment trackers."""

from memprof.integrations.figures import summary

__all__ = ["summary"]
