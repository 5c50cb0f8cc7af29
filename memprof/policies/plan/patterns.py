"""Chooses modules by patterns of their qualified names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memprof.errors import PolicyError

#: Names of the model itself: in patterns, and in named_modules().
WHOLE = (".", "")

#: The parts of a name that are numbers.
_NUMBERS = re.compile(r"(?:^|(?<=\.))([0-9]+)(?=\.|$)")


def match_modules(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Returns the names that match a pattern, in the order given.

    A pattern is a shell pattern whose ``*`` and ``?`` stay within one part of a dotted name and whose ``**`` spans
    parts: ``layers.*``, ``layers.[0-3]``, ``**.mlp``, ``encoder.**``. Without wildcards it is a name. Wildcards match
    modules inside the model; the model itself is written ``.``.

    Args:
        patterns: The patterns.
        names: Qualified names, as in named_modules(); the model itself is "".

    Raises:
        PolicyError: A pattern matches nothing; the message lists similar names.
    """
    known = list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        expression = re.compile(as_expression(pattern))
        is_whole = pattern in WHOLE
        found = [name for name in known if (not name if is_whole else name and expression.fullmatch(name))]
        if not found:
            raise PolicyError(_no_match(pattern, known))
        chosen.update(found)
    return [name for name in known if name in chosen]


def outermost(names: Iterable[str]) -> list[str]:
    """Returns the names that are not inside another of them."""
    known = set(names)

    def is_inside(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:length]) in known for length in range(1, len(parts))) or (name != "" and "" in known)

    return [name for name in names if not is_inside(name)]


def condensed(patterns: Sequence[str]) -> str:
    """Returns patterns in short form: ``layers.0-11, head``, or ``layers.{0-2,5}.mlp``; the root is the whole model.

    Names that differ in the same number become one, where the first of them stands.
    """
    groups: list[_Group] = []
    for parts in map(_NUMBERS.split, patterns):
        if not any(group.add(parts) for group in groups):
            groups.append(_Group([parts]))
    return ", ".join(map(str, groups))


@dataclass
class _Group:
    """Names split at their numbers, which all differ in the same one.

    Attributes:
        names: The names.
        place: The part in which they differ; -1 for one name.
    """

    names: list[list[str]]
    place: int = -1

    def add(self, parts: list[str]) -> bool:
        """Adds a name if it differs from the others in that part alone; returns whether it does."""
        differing = _differing(self.names[0], parts)
        if len(differing) != 1 or self.place not in (-1, differing[0]):
            return False
        self.names.append(parts)
        self.place = differing[0]
        return True

    def __str__(self) -> str:
        first = self.names[0]
        if self.place == -1:
            name = "".join(first)
            return "the whole model" if name in ("", ".") else name
        ranges: list[list[int]] = []
        for number in sorted({int(parts[self.place]) for parts in self.names}):
            if ranges and number == ranges[-1][1] + 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        words = [str(low) if low == high else f"{low}-{high}" for low, high in ranges]
        numbers = words[0] if len(words) == 1 else f"{{{','.join(words)}}}"
        return "".join((*first[: self.place], numbers, *first[self.place + 1 :]))


def by_number(name: str) -> list[str | int]:
    """Sort key of names: numbers in them count as numbers."""
    return [int(part) if place % 2 else part for place, part in enumerate(_NUMBERS.split(name))]


def _differing(one: Sequence[str], two: Sequence[str]) -> list[int]:
    """Returns the numbers in which two names split at their numbers differ; all parts where they differ elsewhere."""
    differing = [place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]]
    is_alike = len(one) == len(two) and all(place % 2 for place in differing)
    return differing if is_alike else list(range(max(len(one), len(two), 2)))


def as_expression(pattern: str) -> str:
    """Converts a pattern to a regular expression for a whole name: fnmatch's, but ``*`` does not match dots."""
    pieces = []
    for piece in re.split(r"(\*\*\.|\*\*|\*|\?)", pattern):
        if piece == "**.":
            pieces.append(r"(?:.*\.)?")
        elif piece == "**":
            pieces.append(r".*")
        elif piece == "*":
            pieces.append(r"[^.]*")
        elif piece == "?":
            pieces.append(r"[^.]")
        elif piece:
            # fnmatch.translate gives (?s:...)\Z, which is spelled differently from version to version.
            pieces.append(re.sub(r"^\(\?s:(.*)\)\\[zZ]$", r"\1", fnmatch.translate(piece), flags=re.DOTALL))
    return "".join(pieces)


def _no_match(pattern: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern, [name for name in names if name], n=3, cutoff=0.4)
    # The outermost names, with numbers folded to a pattern.
    shapes = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names if name)
    highest = sorted(shapes, key=lambda name: name.count("."))
    hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(highest[:5])}."
    return f"no module of the model matches {pattern!r}; {hint}" if names else "the model has no modules."
