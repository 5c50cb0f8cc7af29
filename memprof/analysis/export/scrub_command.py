"""Reduces a command line to its program and option names, without values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from memprof.analysis.export.plain_names import GONE, name_of, plain_name

_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_SHORT = re.compile(r"-[A-Za-z]{1,2}")
_PAIR = re.compile(r"(--?[A-Za-z][\w.-]*|[+~]{0,2}[a-z][\w./@-]*)=(.*)", re.DOTALL)
_PARTS = re.compile(r"[^\s\"'=,;:/\\@?&{}\[\]()]+")


def scrub_command(command: Sequence[str], target: str, names: Callable[[str], str]) -> tuple[str, ...]:
    """Returns a command line without values: ``python run_….py --lr … --name=… …``.

    Args:
        command: Its words, program first.
        target: The recorded script or module among them.
        names: Removes the names of people and hosts from a text.
    """
    script = _place_of(command, target)
    shown = []
    for place, word in enumerate(command):
        if place in (0, script):
            shown.append(names(plain_name(name_of(word))))
        elif pair := _PAIR.fullmatch(word):
            # An option's name belongs to the program; text before another = may be anything.
            shown.append(f"{names(pair[1] if word.startswith('-') else plain_name(pair[1]))}={GONE}")
        elif word in ("-", "--"):
            shown.append(word)
        elif _SHORT.fullmatch(word) or (word.startswith("--") and _OPTION.fullmatch(word)):
            shown.append(names(word))
        else:
            shown.append(f"{word[:2]}{GONE}" if re.match(r"-[A-Za-z]", word) else GONE)
    return tuple(shown)


def values_of(command: Sequence[str], target: str) -> Iterator[str]:
    """Yields the values in a command line, whole and in parts: they may appear elsewhere as well."""
    script = _place_of(command, target)
    for place, word in enumerate(command):
        if place in (0, script):
            continue
        pair = _PAIR.fullmatch(word)
        is_option = word.startswith("--") or _SHORT.fullmatch(word) is not None
        value = pair[2] if pair else "" if is_option else word[2:] if word.startswith("-") else word
        yield value
        yield from _PARTS.findall(value)


def _place_of(command: Sequence[str], target: str) -> int:
    """Returns the index of the script or module; -1 where it cannot be distinguished from an argument."""
    if target in command[1:]:
        return 1 + list(command[1:]).index(target)
    is_python = bool(command) and name_of(command[0]).startswith("python")
    return 1 if is_python and len(command) > 1 and command[1].endswith(".py") else -1
