"""Imports memory snapshots and profiler traces as traces; file content is never executed."""

from __future__ import annotations

from memprof.trace.importers.importing import Imported, import_file

__all__ = ["Imported", "import_file"]
