"""Keeps torch to one thread, as in the tests of the recorder."""

from __future__ import annotations

from tests.recorder.conftest import one_thread

__all__ = ["one_thread"]
