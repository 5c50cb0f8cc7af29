"""Accesses variables of torch's C++ core library, such as its log level, if the library exports them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from memprof.recorder.profiler.torch_library import find_variable, open_library

_LIBRARIES = ("libc10.so", "libc10.dylib", "c10.dll")
_ERRORS = 2


@cache
def core_library() -> Any:
    """Returns torch's core library, opened with ctypes; None if it is not found."""
    return open_library(_LIBRARIES)


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
