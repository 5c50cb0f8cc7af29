"""Writes a pickle piece by piece: rows of columns become dictionaries without an object for each.

Source: Lib/pickletools.py of CPython (the opcodes), and torch's MemoryViz.js (those that its viewer reads).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from memprof.trace.schema import Ints

#: Elements appended at a time, as by Python's own pickler: readers hold one batch on their stack.
_BATCH = 1000
_PROTOCOL = b"\x80\x04"
_LIST, _DICT, _MARK, _APPEND, _APPENDS, _SET_ITEMS, _STOP = b"]", b"}", b"(", b"a", b"e", b"u", b"."
_MEMOIZE, _PAIR, _TRUE, _FALSE, _LONG = b"\x94", b"\x86", b"\x88", b"\x89", b"\x8a"
_MOST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Shared:
    """A value written before, by its number."""

    number: int


@dataclass(frozen=True, eq=False)
class Cells:
    """A column of numbers, or of values written before.

    Attributes:
        values: The numbers, or the numbers of the values; shape ``(rows,)``.
        is_shared: Whether they are numbers of ``PickleWriter.share``.
    """

    values: npt.NDArray[np.integer[Any]]
    is_shared: bool = False


class PickleWriter:
    """Writes one dictionary to a file: protocol 4, of texts, numbers, lists, dictionaries and pairs."""

    def __init__(self, file: BinaryIO) -> None:
        self._write: Callable[[bytes], object] = file.write
        self._texts: dict[str, int] = {}
        self._known = 0
        self._write(_PROTOCOL + _DICT)

    def item(self, key: str, value: object) -> None:
        """Sets a key; a second value for a key replaces the first."""
        self._write(_MARK)
        self._value(key)
        self._value(value)
        self._write(_SET_ITEMS)

    def share(self, key: str, values: Sequence[object]) -> Ints:
        """Writes values that rows refer to, as a list under a key that has to be set again afterwards.

        A pickle has no other place for values that are only referred to: torch's viewer has no opcode to drop one.

        Returns:
            The number of each, shape ``(values,)``.
        """
        numbers = np.zeros(len(values), dtype=np.int64)
        self._write(_MARK)
        self._value(key)
        self._write(_LIST)
        for low in range(0, len(values), _BATCH):
            self._write(_MARK)
            for place, value in enumerate(values[low : low + _BATCH], start=low):
                numbers[place] = self._shared(value)
            self._write(_APPENDS)
        self._write(_SET_ITEMS)
        return numbers

    def lists_of_rows(self, key: str, lists: Iterable[Iterable[Sequence[tuple[Cells, Cells]]]]) -> None:
        """Sets a key to a list of lists of dictionaries.

        Args:
            key: The key.
            lists: Chunks of rows of each list; a chunk is the keys and values of the dictionaries, by column.
        """
        self._write(_MARK)
        self._value(key)
        self._write(_LIST)
        for chunks in lists:
            self._write(_LIST)
            for columns in chunks:
                self._rows(columns)
            self._write(_APPEND)
        self._write(_SET_ITEMS)

    def end(self) -> None:
        """Ends the dictionary."""
        self._write(_STOP)

    def _rows(self, columns: Sequence[tuple[Cells, Cells]]) -> None:
        rows = _dictionaries(columns)
        for low in range(0, len(rows), _BATCH):
            self._write(_MARK)
            self._write(rows[low : low + _BATCH].tobytes())
            self._write(_APPENDS)

    def _shared(self, value: object) -> int:
        if isinstance(value, str):
            self._text(value)
            return self._texts[value]
        self._value(value)
        self._write(_MEMOIZE)
        self._known += 1
        return self._known - 1

    def _text(self, text: str) -> None:
        """Writes a text, or refers to where it was written before."""
        if text in self._texts:
            self._write(_reference(self._texts[text]))
            return
        data = text.encode("utf-8", "surrogatepass")
        head = b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))
        self._write(head + data + _MEMOIZE)
        self._texts[text] = self._known
        self._known += 1

    def _value(self, value: object) -> None:
        if isinstance(value, str):
            self._text(value)
        elif isinstance(value, Shared):
            self._write(_reference(value.number))
        elif isinstance(value, bool):
            self._write(_TRUE if value else _FALSE)
        elif isinstance(value, int):
            self._write(_number(value))
        elif isinstance(value, tuple) and len(value) == 2:
            for one in value:
                self._value(one)
            self._write(_PAIR)
        elif isinstance(value, Mapping):
            self._write(_DICT + _MARK)
            for key, one in value.items():
                self._value(key)
                self._value(one)
            self._write(_SET_ITEMS)
        elif isinstance(value, list):
            self._write(_LIST)
            for low in range(0, len(value), _BATCH):
                self._write(_MARK)
                for one in value[low : low + _BATCH]:
                    self._value(one)
                self._write(_APPENDS)
        else:
            raise TypeError(f"cannot write {type(value).__name__}")


def _number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -_MOST_INT32 <= value <= _MOST_INT32:
        return b"J" + struct.pack("<i", value)
    data = pickle.encode_long(value)
    return _LONG + bytes([len(data)]) + data


def _reference(number: int) -> bytes:
    return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)


def _dictionaries(columns: Sequence[tuple[Cells, Cells]]) -> npt.NDArray[np.uint8]:
    """Returns the bytes of dictionaries of one width, shape ``(rows, bytes)``."""
    cells = [_cells(one) for pair in columns for one in pair]
    count = len(columns[0][0].values)
    parts = [(_DICT + _MARK, None), *cells, (_SET_ITEMS, None)]
    width = sum(len(head) + (0 if tail is None else tail.shape[1]) for head, tail in parts)
    rows = np.empty((count, width), dtype=np.uint8)
    at = 0
    for head, tail in parts:
        rows[:, at : at + len(head)] = np.frombuffer(head, dtype=np.uint8)
        at += len(head)
        if tail is not None:
            rows[:, at : at + tail.shape[1]] = tail
            at += tail.shape[1]
    return rows


def _cells(column: Cells) -> tuple[bytes, npt.NDArray[np.uint8] | None]:
    """Returns what all cells of a column begin with, and the rest of each: None where they are equal."""
    values = column.values.astype("<i8", copy=False)
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if low == high:
        return (_reference(low) if column.is_shared else _number(low)), None
    if column.is_shared:
        head, width = (b"h", 1) if high < 256 else (b"j", 4)
    elif low >= -_MOST_INT32 and high <= _MOST_INT32:
        head, width = b"J", 4
    else:
        width = min(len(pickle.encode_long(max(high, -low))), 8)
        head = _LONG + bytes([width])
    return head, np.ascontiguousarray(values).view(np.uint8).reshape(len(values), 8)[:, :width]
