"""Loads a pickle of plain containers without ever executing its content, also of the oldest protocols."""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any, NoReturn

from memprof.trace.importers.pickles.pickle_opcodes import DEEPEST, IMPORTING, RefusedError, check_end, check_opcodes

__all__ = ["RefusedError", "load_plain"]
#: Bytes read ahead for the unpickler.
_AHEAD = 1 << 17
#: Exceptions raised for a pickle whose opcodes are allowed, but in an invalid order.
_NONSENSE = (
    pickle.UnpicklingError,
    EOFError,
    TypeError,
    ValueError,  # includes a text that is not UTF-8
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)
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


def load_plain(data: bytes, on_progress: Callable[[float], None] = lambda share: None) -> Any:
    """Loads a pickle of dicts, lists, tuples, texts, numbers, booleans and None.

    Opcodes are checked before anything is loaded; the unpickler then resolves no classes.

    Args:
        data: The pickle, protocol 0 to 5.
        on_progress: Called from time to time with the share checked.

    Raises:
        RefusedError: It holds anything else; the reason names what.
    """
    try:
        if looks_old(data):
            check_end(data, check_old_opcodes(data))
        else:
            check_opcodes(data, on_progress)
    except RefusedError as refusal:
        raise _named(data, refusal) if refusal.has_name else refusal from None
    return _load(data)


def _load(data: bytes) -> Any:
    try:
        return _PlainUnpickler(_Bytes(data)).load()
    except MemoryError:
        raise RefusedError("not enough memory to load it") from None
    except _NONSENSE as error:
        detail = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise RefusedError(f"its opcodes are in an invalid order ({detail})") from error


class _Bytes(io.BytesIO):
    """Bytes as the unpickler reads them: a frame's claimed size beyond their end is never allocated."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._data = data

    def peek(self, size: int) -> bytes:
        """Returns the next bytes: without frames, before protocol 4, the unpickler would request each byte singly."""
        position = self.tell()
        return self._data[position : position + max(size, _AHEAD)]


class _NameRefusedError(Exception):
    """The name that a pickle requests to import."""


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that resolves no class and no persistent object."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Rejects every name."""
        raise _NameRefusedError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Rejects every persistent id."""
        raise _NameRefusedError(f"persistent id {pid!r}")


def _named(data: bytes, refusal: RefusedError) -> RefusedError:
    """Reads the name that is requested.

    Everything before it has passed the check; the unpickler stops at the name, which is never looked up.
    """
    position = refusal.position
    opcode = refusal.reason.split(" opcode ", 1)[1].split(",", 1)[0]
    if opcode.startswith("EXT"):
        width = int(opcode[3:])
        code = int.from_bytes(data[position + 1 : position + 1 + width], "little")
        known = copyreg._inverted_registry.get(code)  # type: ignore[attr-defined]  # the registry has no other door
        name = ".".join(known) if known else f"extension {code}"
        return RefusedError(f"it imports {_shown(name)} (opcode {opcode})", position)
    try:
        # Up to the end of its line: GLOBAL and INST spread the name over two lines.
        _PlainUnpickler(_Bytes(data[: position + 1000])).load()
    except _NameRefusedError as name_error:
        return RefusedError(f"it imports {_shown(str(name_error))} (opcode {opcode})", position)
    except _NONSENSE:
        return refusal  # the name is cut short, or is not text
    return refusal


def _shown(name: str) -> str:
    text = name if len(name) <= 100 else f"{name[:97]}..."
    return text if text.isprintable() else ascii(text)


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
