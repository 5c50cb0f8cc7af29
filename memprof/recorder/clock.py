"""The recorder's clock, which stays the system's where a job replaces functions of ``time``, as frozen time does."""

from __future__ import annotations

from time import time_ns

#: Returns the time in Unix nanoseconds. ``memprof record`` sets what the interpreter had when it started; in a script
#: that records itself, it is bound when memprof is imported.
clock_ns = time_ns
