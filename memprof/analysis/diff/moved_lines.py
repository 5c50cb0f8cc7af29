"""Lines of code that an edit above them has moved: which line of the base is which of the head."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher

#: Files with more lines that hold memory are compared by the numbers of their lines: matching is quadratic.
_MOST_LINES = 400


def with_moved_lines(base: Mapping[str, int], head: Mapping[str, int]) -> dict[str, int]:
    """Renames the base's lines of code to what they are called now.

    A file whose lines are the same on both sides stays as it is. In another, lines stay in order, and those that hold
    the same as before are the same line; so are those between two such pairs where both sides have equally many.

    Args:
        base: Bytes by ``file:line``; other names stay as they are.
        head: The same now.

    Returns:
        The bytes of the base by their names now; a line that is gone, and whose number another has now, is followed by
        ``(before)``.
    """
    renamed: dict[str, str] = {}
    before, after = _by_file(base), _by_file(head)
    for file in before.keys() & after.keys():
        if before[file] != after[file] and max(len(before[file]), len(after[file])) <= _MOST_LINES:
            lines = {f"{file}:{line}" for line in before[file]}
            renamed |= {name: f"{name} (before)" for name in lines & head.keys()}
            renamed |= _match(file, before[file], after[file], base, head)
    return {renamed.get(name, name): size for name, size in base.items()}


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
