"""The version of memprof, defined only here."""

from __future__ import annotations

__version__ = "1.0.0"
