"""Reads the source files that recorded stacks name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

#: Larger files are not read.
_MOST_BYTES = 4 * 2**20
#: A line of a stack: file, line and function.
PLACE = re.compile(r"(?P<path>.+):(?P<line>[0-9]{1,9}):(?P<function>.*)")
_DEFINES = re.compile(r"\s*(async\s+)?def\s")


@cache
def lines_of(path: str) -> list[str]:
    """Returns the lines of a source file; none where it is not an ordinary one."""
    place = Path(path)
    is_source = place.suffix == ".py" and place.is_file() and place.stat().st_size <= _MOST_BYTES
    return place.read_text(encoding="utf-8", errors="replace").splitlines() if is_source else []


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


def forget_sources() -> None:
    """Drops what was read: the files may change before they are read again."""
    lines_of.cache_clear()
    function_around.cache_clear()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
