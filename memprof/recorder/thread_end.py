"""Detects the end of a thread, in that thread: no session of torch's profiler may outlive its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ThreadEnd:
    """Calls back when the thread that created it ends."""

    def __init__(self, action: Callable[[], None]) -> None:
        """Waits for the current thread to end.

        Args:
            action: Called in that thread; it must not raise.
        """
        self._of_thread = threading.local()
        self._of_thread.end = _Last(action)


class _Last:
    """Thread-local object, freed with its thread."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __del__(self) -> None:
        self._action()
