"""The version of memprof, written once: here."""

from __future__ import annotations

__version__ = "0.1.0"
