"""Notices when the job starts torch's profiler itself, just before it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.autograd.profiler

# The names through which torch.profiler, torch.autograd.profiler and emit_nvtx start a session.
_ENTRIES = ("_prepare_profiler", "_enable_profiler")


class ProfilerGuard:
    """Calls back before each start of the job's own profiler, while installed."""

    def __init__(self, before_start: Callable[[], None]) -> None:
        """Prepares the guard."""
        self._before_start = before_start
        self._found: dict[str, Any] = {}

    def install(self) -> None:
        """Puts the guard around torch's entries."""
        for name in _ENTRIES:
            entry = getattr(torch.autograd.profiler, name, None)
            if entry is not None and name not in self._found:
                self._found[name] = entry
                setattr(torch.autograd.profiler, name, self._guarded(entry))

    def remove(self) -> None:
        """Puts torch's entries back."""
        for name, entry in self._found.items():
            setattr(torch.autograd.profiler, name, entry)
        self._found.clear()

    def _guarded(self, entry: Any) -> Any:
        def start(*args: Any, **kwargs: Any) -> Any:
            self._before_start()
            return entry(*args, **kwargs)

        return start
