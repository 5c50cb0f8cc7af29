"""Reads the source files that recorded stacks name."""

from __future__ import annotations

import os
import re
import stat
from functools import cache
from pathlib import Path

#: Larger files are not read.
_MOST_BYTES = 4 * 2**20
#: A line of a stack: file, line and function.
PLACE = re.compile(r"(?P<path>.+):(?P<line>[0-9]{1,9}):(?P<function>.*)")
_DEFINES = re.compile(r"\s*(async\s+)?def\s+(?P<name>\w+)")
_CLASS = re.compile(r"\s*class\s+(\w+)")
#: A frame of torch itself.
_TORCH = re.compile(r"[/\\](site|dist)-packages[/\\]torch[/\\]")
#: Files that were read, with their state at that time.
_read: dict[str, tuple[int, int] | None] = {}


def is_source_file(path: str) -> bool:
    """Returns whether a path is that of an ordinary Python file of up to 4 MiB on this machine.

    Recordings and snapshots by others name paths, too. A network path is not looked up: on Windows, that would sign in
    to the host it names.
    """
    found = _stat(path) if path.endswith(".py") else None
    return found is not None and stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES


def is_of_torch(frame: str) -> bool:
    """Returns whether a line of a stack is in torch itself."""
    return _TORCH.search(frame) is not None


@cache
def lines_of(path: str) -> list[str]:
    """Returns the lines of a source file; none where it is not an ordinary one, or may not be read."""
    _read[path] = _state_of(path)
    if not is_source_file(path):
        return []
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


@cache
def function_around(path: str, line: int) -> tuple[int, int]:
    """Returns the lines of the function around a line, from its ``def`` on; ``(0, 0)`` where they cannot be read.

    Args:
        path: The file.
        line: A line in the function's body, 1 first.

    Returns:
        Its first line, counted from 0, and the one behind its last.
    """
    lines = lines_of(path)
    if not 0 < line <= len(lines):
        return 0, 0
    first = line - 1
    while first > 0 and not (_DEFINES.match(lines[first]) and _indent(lines[first]) < _indent(lines[line - 1])):
        first -= 1
    last = line
    while last < len(lines) and (not lines[last].strip() or _indent(lines[last]) > _indent(lines[first])):
        last += 1
    return first, last


def class_around(path: str, line: int, function: str) -> str:
    """Returns the class whose method a line is in; "" where there is none, or the file is not the one that ran.

    Args:
        path: The file.
        line: A line in the method's body, 1 first.
        function: Name of the method.
    """
    first, last = function_around(path, line)
    lines = lines_of(path)
    defined = _DEFINES.match(lines[first]) if first < last else None
    if defined is None or defined["name"] != function:
        return ""
    outer = (text for text in lines[:first][::-1] if text.strip() and _indent(text) < _indent(lines[first]))
    match = _CLASS.match(next(outer, ""))
    return "" if match is None else match[1]


def forget_changed_sources() -> bool:
    """Drops what was read if one of the files has changed since; returns whether it did.

    The ranks of a job run the same files, which are read once for all of them.
    """
    if all(_state_of(path) == state for path, state in _read.items()):
        return False
    _read.clear()
    lines_of.cache_clear()
    function_around.cache_clear()
    return True


def _state_of(path: str) -> tuple[int, int] | None:
    """Returns the time of a file's last change, in nanoseconds, and its size; None where there is none."""
    found = _stat(path)
    return None if found is None else (found.st_mtime_ns, found.st_size)


def _stat(path: str) -> os.stat_result | None:
    """Returns the state of a file; None where there is none, where it cannot be looked up, and for a network path."""
    if path.replace("\\", "/").startswith("//"):
        return None
    try:
        return Path(path).stat()
    except (OSError, ValueError):
        return None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
