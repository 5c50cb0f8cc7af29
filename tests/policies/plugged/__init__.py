"""A policy that is not part of memprof: runs the forward of modules again, as checkpoint does."""
