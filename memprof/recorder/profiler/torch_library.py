"""torch's shared libraries: their variables, and the process-wide state of Kineto.

Kineto has one trace at a time, whichever thread began it; torch's Python API shows only sessions of the calling
thread, and none that is warming up. Kineto's own state (`ActivityProfilerProxy::isActive`) is read through ctypes, as
are its log level and the thread of its configuration loader: nothing in a job needs that thread, and a forked child
that exits normally waits for it forever, since threads do not cross a fork.

Semi-private, therefore feature-tested: each entry is used only if the library exports it and its objects look as
expected.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

_TORCH_LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")
_API = "_ZN9libkineto3apiEv"
_PROXY_TABLE = "_ZTVN9libkineto21ActivityProfilerProxyE"
_IS_ACTIVE = "_ZN9libkineto21ActivityProfilerProxy8isActiveEv"
_SEVERITY = "_ZN9libkineto6Logger14severityLevel_E"
_SUPPRESS = "suppressLibkinetoLogMessages"
_LOADER = "_ZN9libkineto12ConfigLoader8instanceEv"
_STOP_THREAD = "_ZN9libkineto12ConfigLoader10stopThreadEv"
#: Word offsets: from the start of the library's interface to its profiler, from the start of a virtual function table
#: to the address that objects point to, and from the profiler to its controller, created with the first session.
_PROFILER, _TABLE_START, _CONTROLLER = 1, 2, 3
_WORD = ctypes.sizeof(ctypes.c_void_p)
#: Above every level that Kineto reports.
_SILENT = 9
#: If one of these is set, Kineto accepts requests while the job runs, which its thread polls for.
_REQUESTS = ("KINETO_USE_DAEMON", "KINETO_CONFIG")
_LEVEL = "KINETO_LOG_LEVEL"
_LEADING_NUMBER = re.compile(r"\s*[+-]?\d+")


def open_library(names: Sequence[str]) -> Any:
    """Returns the first of torch's libraries with one of these names, opened with ctypes; None if there is none."""
    folder = Path(torch.__file__).parent / "lib"
    for name in names:
        if (folder / name).exists():
            try:
                return ctypes.CDLL(str(folder / name))
            except OSError:
                return None
    return None


def find_variable(library: Any, name: str, kind: Any) -> Any:
    """Returns a variable of a library, None if it exports none of that name."""
    try:
        return None if library is None else kind.in_dll(library, name)
    except ValueError:
        return None


_C10_LIBRARIES = ("libc10.so", "libc10.dylib", "c10.dll")
_ERRORS = 2


@cache
def core_library() -> Any:
    """Returns torch's core library, opened with ctypes; None if it is not found."""
    return open_library(_C10_LIBRARIES)


def core_flag(name: str, kind: Any) -> Any:
    """Returns a variable of the core library, None if it exports none of that name."""
    return find_variable(core_library(), name, kind)


def log_level() -> Any:
    """Returns the variable that holds the log level, None if torch logs in another way."""
    return core_flag("FLAGS_caffe2_log_level", ctypes.c_int)


@contextmanager
def errors_only() -> Iterator[None]:
    """Suppresses warnings of torch's core on stderr for the duration."""
    level = log_level()
    if level is None:
        yield
        return
    found = level.value
    level.value = max(found, _ERRORS)
    try:
        yield
    finally:
        level.value = found


class Kineto:
    """The library as loaded in this process."""

    def __init__(self, library: Any) -> None:
        """Finds its entries; any of them may be missing in a torch built differently.

        Args:
            library: The library, opened with ctypes; None if there is none.
        """
        self._api = _function(library, _API, ctypes.c_void_p)
        self._is_active = _function(library, _IS_ACTIVE, ctypes.c_bool, ctypes.c_void_p)
        self._loader = _function(library, _LOADER, ctypes.c_void_p)
        self._stop_thread = _function(library, _STOP_THREAD, None, ctypes.c_void_p)
        self._severity = find_variable(library, _SEVERITY, ctypes.c_int)
        self._suppress = _function(library, _SUPPRESS, None)
        table = find_variable(library, _PROXY_TABLE, ctypes.c_void_p)
        self._proxy_table = 0 if table is None else ctypes.addressof(table) + _TABLE_START * _WORD

    @property
    def can_report(self) -> bool:
        """Whether the library reports active traces."""
        return bool(self._api and self._is_active and self._proxy_table)

    @property
    def is_initialized(self) -> bool:
        """Whether a session of this process has initialized the library; False if unknown."""
        return self._profiler() is not None

    def is_active(self) -> bool:
        """Whether a trace of any thread is warming up or running; False if unknown."""
        profiler = self._profiler()
        return profiler is not None and bool(self._is_active(profiler))

    def stop_thread(self) -> None:
        """Stops the thread of the configuration loader, unless the job's environment makes Kineto accept requests."""
        if self._loader and self._stop_thread and not any(os.environ.get(name) for name in _REQUESTS):
            self._stop_thread(self._loader())

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Suppresses Kineto's reports on stderr for the duration, then restores its log level."""
        if self._severity is None:
            os.environ.setdefault(_LEVEL, str(_SILENT))
            yield
            return
        found, given = self._severity.value, os.environ.get(_LEVEL)
        is_first = not self.is_initialized
        try:
            self._severity.value = _SILENT
            if is_first:  # on initialization, the library reads its level from the environment
                os.environ[_LEVEL] = str(_SILENT)
            yield
        finally:
            self._severity.value = found
            if is_first:
                self._set_level_as_given(given)

    def _set_level_as_given(self, given: str | None) -> None:
        """Sets the level from the environment, as the library and torch do when they initialize the library."""
        if given is not None:
            os.environ[_LEVEL] = given
            digits = _LEADING_NUMBER.match(given)
            self._severity.value = int(digits[0]) if digits is not None else 0
            return
        del os.environ[_LEVEL]
        if self._suppress is not None:
            self._suppress()

    def _profiler(self) -> Any:
        """Returns the address of the profiler, None before the first session."""
        if not self.can_report:
            return None
        profiler = _word(self._api(), _PROFILER)
        if not profiler or _word(profiler, 0) != self._proxy_table or not _word(profiler, _CONTROLLER):
            return None
        return profiler


@cache
def kineto() -> Kineto:
    """Returns the library that torch has loaded in this process."""
    return Kineto(open_library(_TORCH_LIBRARIES))


def _word(address: int, place: int) -> int:
    return ctypes.c_void_p.from_address(address + place * _WORD).value or 0


def _function(library: Any, name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(library, name, None)
    if found is not None:
        found.restype, found.argtypes = result, list(arguments)
    return found
