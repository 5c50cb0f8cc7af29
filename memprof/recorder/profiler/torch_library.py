"""Opens torch's shared libraries and finds their variables, such as the log level of its core, if they export them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch


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
    """Returns a variable of a library, None if it exports none of that name.

    Args:
        library: The library; None if there is none.
        name: The variable's symbol.
        kind: Its ctypes type.
    """
    try:
        return None if library is None else kind.in_dll(library, name)
    except ValueError:
        return None


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
