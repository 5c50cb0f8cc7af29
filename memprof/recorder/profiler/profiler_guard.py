"""Intercepts the start of a session of torch's profiler by the job, and stops memprof's own first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch._C import _autograd

from memprof.recorder.profiler import sessions

#: Torch's entry points that begin a session, and whether that is a Kineto trace. Such a trace is prepared before it is
#: enabled; sessions of NVTX, ITT and the legacy profiler belong to their thread only.
_ENTRIES = {"_prepare_profiler": True, "_enable_profiler": False, "_enable_profiler_legacy": False}
#: Modules that export them under these names; few jobs import the last one.
_HOLDERS = ("torch._C._autograd", "torch.autograd", "torch.autograd.profiler", "torch.autograd.profiler_legacy")


class ProfilerGuard:
    """Calls back before the job begins each session, while installed; then memprof's own session ends.

    Several may be installed at once.
    """

    _installed: list[ProfilerGuard] = []  # noqa: RUF012 - one list for all guards
    _found: dict[tuple[str, str], Any] = {}  # noqa: RUF012

    def __init__(self, before_start: Callable[[], None] | None = None) -> None:
        """Prepares a guard.

        Args:
            before_start: Called in the job's thread, to stop what its owner runs in that thread. It must not raise.
        """
        self._before_start = before_start

    def install(self) -> None:
        """Wraps torch's entry points."""
        if self not in self._installed:
            self._installed.append(self)
        for holder in _HOLDERS:
            for name, is_kineto in _ENTRIES.items():
                entry = getattr(sys.modules.get(holder), name, None)
                if entry is not None and (holder, name) not in self._found:
                    self._found[holder, name] = entry
                    setattr(sys.modules[holder], name, _guarded(entry, is_kineto=is_kineto))

    def remove(self) -> None:
        """Restores torch's entry points with the last guard, unless something is left that a session would meet."""
        if self in self._installed:
            self._installed.remove(self)
        if not self._installed and not sessions.has_listeners():
            for (holder, name), entry in self._found.items():
                setattr(sys.modules[holder], name, entry)
            self._found.clear()

    @classmethod
    def make_way(cls, *, is_kineto: bool) -> None:
        """Ends memprof's own sessions before a session of the job's begins in this thread."""
        for guard in list(cls._installed):
            if guard._before_start is not None:
                guard._before_start()
        sessions.make_way(is_kineto=is_kineto)


def _guarded(entry: Any, *, is_kineto: bool) -> Any:
    """Returns the replacement of an entry point.

    The replacement is a type: creating an object ends memprof's sessions, and initializing it runs the entry itself. So
    nothing of memprof's is on the stack while the entry runs, nor in the traceback of an error it raises. The object is
    freed immediately, since the caller keeps no result of the entry.
    """

    def make(kind: type, /, *args: Any, **kwargs: Any) -> Any:
        ProfilerGuard.make_way(is_kineto=is_kineto)
        return object.__new__(kind)

    def end(_: Any) -> None:
        sessions.way_is_taken()

    members = {"__new__": make, "__init__": entry, "__del__": end, "__module__": _autograd.__name__}
    return type(entry.__name__, (), members)
