"""The versions of memprof and of its traces, defined only here."""

from __future__ import annotations

__version__ = "1.0.0"

#: Version of the tables of a trace. A reader accepts every version up to its own.
#:
#: ==  ===========================================
#: 1   plain Parquet tables
#: 2   coded columns (``files.coding``)
#: ==  ===========================================
SCHEMA_VERSION = 2
