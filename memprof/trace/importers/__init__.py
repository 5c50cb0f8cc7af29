"""Reads memory snapshots and profilers' traces as a trace; nothing in a file is ever run."""

from __future__ import annotations

from memprof.trace.importers.importing import Imported, import_file

__all__ = ["Imported", "import_file"]
