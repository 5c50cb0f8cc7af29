"""Names of repeated layers as ranges: ``layers.0-11.mlp`` for twelve modules, and back."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Hashable, Iterator, Mapping

#: A part of a module's name that is the number of a layer, and one that stands for several.
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]*)(?![^.])")
_RANGES = re.compile(r"(?=.*[-,])[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")
#: Far more than the modules of the largest models.
_MOST_NAMES = 1_000_000


def fold_alike(values: Mapping[str, Hashable]) -> Iterator[tuple[str, list[str]]]:
    """Groups modules with equal values whose names differ in the numbers of layers.

    Yields:
        A name, with the numbers as ranges, and the modules that it stands for, which are all that it could; every
        module once.
    """
    alike: dict[tuple[str, Hashable], list[str]] = {}
    for name, value in values.items():
        alike.setdefault((_NUMBER.sub("*", name), value), []).append(name)
    for names in alike.values():
        if is_grid(names):
            yield in_ranges(names), names
        else:  # ranges would name modules of another value
            yield from ((name, [name]) for name in names)


def is_grid(names: Collection[str]) -> bool:
    """Returns whether modules are all combinations of their numbers, so that ranges name these and no others."""
    split = [name.split(".") for name in names]
    is_even = len({len(parts) for parts in split}) == 1
    return is_even and math.prod(len(set(numbers)) for numbers in zip(*split, strict=True)) == len(names)


def in_ranges(names: Collection[str]) -> str:
    """Returns a name for modules whose names differ in numbers, such as ``layers.0-11.mlp``; ``*`` for other parts."""
    return ".".join(_numbers(set(parts)) for parts in zip(*(name.split(".") for name in names), strict=False))


def has_range(name: str) -> bool:
    """Returns whether a name stands for several modules, or looks as if it did."""
    return any(_RANGES.fullmatch(part) for part in name.split("."))


def names_in(name: str) -> list[str]:
    """Returns the modules that a name stands for: several if it has ranges.

    Raises:
        ValueError: They are more than any model has.
    """
    parts: list[list[range] | str] = []
    for part in name.split("."):
        ends = [one.partition("-") for one in part.split(",")] if _RANGES.fullmatch(part) else []
        parts.append([range(int(low), int(high or low) + 1) for low, _, high in ends] or part)
    if math.prod(1 if isinstance(part, str) else sum(map(len, part)) for part in parts) > _MOST_NAMES:
        raise ValueError(f"{name}, which names too many modules")
    listed = [[part] if isinstance(part, str) else map(str, itertools.chain(*part)) for part in parts]
    return [".".join(combined) for combined in itertools.product(*listed)]


def _numbers(texts: set[str]) -> str:
    """Returns numbers as ranges, ``0-11`` or ``0-3,6``; a single text as it is, several others as ``*``."""
    if len(texts) == 1:
        return texts.pop()
    if not all(text.isdecimal() for text in texts):
        return "*"
    ranges: list[list[int]] = []
    for number in sorted(map(int, texts)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
