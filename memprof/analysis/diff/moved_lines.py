"""Matches lines of code that an edit above them has moved between base and head."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher

#: Files with more lines that hold memory are compared by line number: matching is quadratic.
_MOST_LINES = 400


def with_moved_lines(base: Mapping[str, int], head: Mapping[str, int]) -> dict[str, int]:
    """Renames the base's lines of code to their names in the head.

    A file with the same lines on both sides is left unchanged. In other files, lines keep their order, and lines with
    the same bytes match; so do the lines between two such pairs where both sides have equally many.

    Args:
        base: Bytes by ``file:line``; other names are unchanged.
        head: The same in the head.

    Returns:
        The base's bytes by their names in the head; a removed line whose number another line has now gets the suffix
        ``(before)``.
    """
    renamed = moved_lines(base, head)
    return {renamed.get(name, name): size for name, size in base.items()}


def moved_lines(base: Mapping[str, int], head: Mapping[str, int]) -> dict[str, str]:
    """Returns the new names of the base's lines that ``with_moved_lines`` renames; its arguments are the same."""
    renamed: dict[str, str] = {}
    before, after = _by_file(base), _by_file(head)
    for file in before.keys() & after.keys():
        if before[file] != after[file] and max(len(before[file]), len(after[file])) <= _MOST_LINES:
            lines = {f"{file}:{line}" for line in before[file]}
            renamed |= {name: f"{name} (before)" for name in lines & head.keys()}
            renamed |= _match(file, before[file], after[file], base, head)
    return renamed


def _by_file(parts: Mapping[str, int]) -> dict[str, list[int]]:
    files: dict[str, list[int]] = {}
    for name in parts:
        file, colon, line = name.rpartition(":")
        if colon and line.isdecimal() and str(int(line)) == line:
            files.setdefault(file, []).append(int(line))
    return {file: sorted(lines) for file, lines in files.items()}


def _match(
    file: str, before: list[int], after: list[int], base: Mapping[str, int], head: Mapping[str, int]
) -> dict[str, str]:
    old, new = ([parts[f"{file}:{line}"] for line in lines] for parts, lines in ((base, before), (head, after)))
    pairs: dict[int, int] = {}
    matcher = SequenceMatcher(a=old, b=new, autojunk=False)
    for tag, first, end, other_first, other_end in matcher.get_opcodes():
        if tag == "equal" or end - first == other_end - other_first:
            pairs |= zip(before[first:end], after[other_first:other_end], strict=True)
        else:
            pairs |= {line: line for line in before[first:end] if line in after[other_first:other_end]}
    return {f"{file}:{line}": f"{file}:{now}" for line, now in pairs.items()}
