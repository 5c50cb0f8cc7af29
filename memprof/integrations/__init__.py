"""memprof inside other libraries' training loops and notebooks, and its metrics for experiment trackers."""

from memprof.integrations.figures import summary
from memprof.integrations.trackers import log
from memprof.integrations.what_if import what_if

__all__ = ["log", "summary", "what_if"]
