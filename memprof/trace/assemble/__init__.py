"""Works out what a raw recording means: raw rows of one process become the tables of a trace."""

from __future__ import annotations

from memprof.trace.assemble.process import assemble_devices, assemble_process

__all__ = ["assemble_devices", "assemble_process"]
