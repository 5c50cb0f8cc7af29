"""Validates pickles of protocols 0 and 1, which few tools still write, opcode by opcode."""

from __future__ import annotations

import pickletools
import re

from memprof.trace.importers.pickle_opcodes import DEEPEST, IMPORTING, RefusedError

#: Opcodes that push a text, a number, or what was seen before.
_VALUES = {
    "NONE", "INT", "LONG", "FLOAT", "STRING", "UNICODE", "BININT", "BININT1", "BININT2", "BINFLOAT",
    "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "GET", "BINGET", "LONG_BINGET",
}  # fmt: skip
_WHOLE_NUMBERS = {"INT", "LONG", "BININT", "BININT1", "BININT2"}
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}

#: How such pickles start: with a dict or list, or with a name to import.
_START = re.compile(rb"\((?:dp|lp|d|l)\d*\n?|[\]}](?:q|r|[(.])|\(?[ci][\w.]+\n[\w.]+\n", re.ASCII)

#: The depth of a whole number.
_NUMBER = -1

#: Whole numbers as long as 64 bits take in decimal digits, and a sign.
_LONGEST_NUMBER = 20


def looks_old(data: bytes) -> bool:
    """Returns whether data starts as a pickle of protocol 0 or 1 does."""
    return _START.match(data[:1000]) is not None


def check_old_opcodes(data: bytes) -> int:
    """Checks that a pickle consists of plain containers, texts and numbers.

    Args:
        data: The pickle, protocol 0 or 1.

    Returns:
        The position after its end.

    Raises:
        RefusedError: It holds anything else, nests too deeply, or is cut short.
    """
    stack, position = _Depths(), 0
    try:
        for opcode, argument, start in pickletools.genops(data):
            position, name = int(start or 0), opcode.name
            if name == "STOP":
                if stack.marks:
                    raise RefusedError("its marks do not match", position)
                return position + 1
            if name in _PUTS:
                place = int(argument or 0)
                if place > position:
                    raise RefusedError(f"it names place {place:,} of its memo after {position:,} bytes", position)
            elif name in _VALUES:
                if type(argument) is int and len(str(argument)) > _LONGEST_NUMBER:
                    raise RefusedError("it holds a whole number of more than 64 bits", position)
                stack.depths.append(_NUMBER if name in _WHOLE_NUMBERS else 0)
            elif not stack.build(name, position):
                has_name = name in IMPORTING
                raise RefusedError(f"it holds the opcode {name}, which no snapshot has", position, has_name)
    except ValueError:  # an argument that is cut short, or is not what the opcode takes
        raise RefusedError("it is damaged or cut short", position) from None
    raise RefusedError("it is cut short", len(data))


class _Depths:
    """The stack of an unpickler, each value reduced to how deep it is nested.

    Attributes:
        depths: The depth of each value; ``_NUMBER`` for whole numbers.
        marks: Positions of open marks.
    """

    def __init__(self) -> None:
        self.depths: list[int] = []
        self.marks: list[int] = []

    def build(self, name: str, position: int) -> bool:
        """Follows an opcode that builds a container; returns False for any other.

        Raises:
            RefusedError: The opcode is out of order, or nests too deeply.
        """
        if name == "MARK":
            self.marks.append(len(self.depths))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            self.depths.append(0)
        elif name in ("LIST", "DICT", "TUPLE"):
            inside = self._taken(self._mark(position), position)
            # Tuples used as keys are hashed whole: a few nested ones can take practically forever.
            if name == "TUPLE" and set(inside) - {_NUMBER}:
                raise RefusedError("it holds a tuple of something else than whole numbers", position)
            self.depths.append(max(inside, default=_NUMBER) + 1)
        elif name in ("APPEND", "SETITEM", "APPENDS", "SETITEMS"):
            count = {"APPEND": 1, "SETITEM": 2}.get(name)
            inside = self._taken(self._mark(position) if count is None else len(self.depths) - count, position)
            if not self.depths:
                raise RefusedError("its opcodes are in an invalid order", position)
            self.depths[-1] = max(self.depths[-1], max(inside, default=_NUMBER) + 1)
        else:
            return False
        if len(self.marks) > DEEPEST or (self.depths and self.depths[-1] > DEEPEST):
            raise RefusedError(f"its containers are nested more than {DEEPEST} deep", position)
        return True

    def _mark(self, position: int) -> int:
        if not self.marks:
            raise RefusedError("its marks do not match", position)
        return self.marks.pop()

    def _taken(self, first: int, position: int) -> list[int]:
        if first < 0:
            raise RefusedError("its opcodes are in an invalid order", position)
        inside = self.depths[first:]
        del self.depths[first:]
        return inside
