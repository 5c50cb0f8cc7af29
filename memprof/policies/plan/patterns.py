"""Chooses modules by patterns of their qualified names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence

from memprof.errors import PolicyError

#: Names of the model itself: in patterns, and in named_modules().
WHOLE = (".", "")

#: A name with a number among its parts; the last one counts.
_NUMBERED = re.compile(r"((?:.*\.)?)([0-9]+)((?:\.[^0-9][^.]*)*)")


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
    """Returns patterns in short form: consecutive names become ``layers.0-11, head``; the root is the whole model."""
    runs: list[tuple[str, str, str]] = []  # what comes before the number, the last number, what comes after
    words: list[str] = []
    for pattern in patterns:
        found = _NUMBERED.fullmatch(pattern)
        before, number, after = found.groups() if found else (pattern, "", "")
        last = runs[-1] if runs else ("", "", "")
        if number and last[1] and (before, after) == (last[0], last[2]) and int(number) == int(last[1]) + 1:
            first = words[-1].removeprefix(before).removesuffix(after).split("-")[0]
            words[-1] = f"{before}{first}-{number}{after}"
        else:
            words.append("the whole model" if pattern in ("", ".") else pattern)
        runs.append((before, number, after))
    return ", ".join(words)


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
    return f"No module of the model matches {pattern!r}; {hint}" if names else "The model has no modules."
