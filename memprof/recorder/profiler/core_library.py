"""Variables of torch's C++ core library, its log level among them, where the library has them."""

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
    """Returns torch's core library as ctypes opens it, None where it is not found."""
    return open_library(_LIBRARIES)


def core_flag(name: str, kind: Any) -> Any:
    """Returns a variable of the core library, None where it has none of that name."""
    return find_variable(core_library(), name, kind)


def log_level() -> Any:
    """Returns the variable that holds the log level, None where torch logs in another way."""
    return core_flag("FLAGS_caffe2_log_level", ctypes.c_int)


@contextmanager
def errors_only() -> Iterator[None]:
    """Keeps torch's core from writing warnings on stderr meanwhile."""
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
