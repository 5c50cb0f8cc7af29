"""memprof inside other libraries' training loops and notebooks, and its metrics for experiment trackers."""

from memprof.integrations.trackers import log, summary
from memprof.integrations.what_if import what_if

__all__ = ["log", "summary", "what_if"]
