"""Reads a snapshot's pickle piece by piece: entries of its histories are handed on, and none is kept."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any, BinaryIO

from memprof.trace.importers.pickles.pickle_opcodes import DEEPEST, RefusedError

#: Bytes read at a time.
_PIECE_BYTES = 1 << 20
#: No opcode but a text with a length of 4 bytes is longer.
_LONGEST = 300
#: Bytes of a text, and elements of an entry's list, that no snapshot has: frames of a stack are some hundred.
_MOST_TEXT_BYTES, _MOST_ELEMENTS = 1 << 24, 20_000


@cache
def _tokens() -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Returns the expressions of one opcode whose length needs no arithmetic, with its argument, and of many."""
    # Longer ones, of which any number can have the same hash, are no address or size.
    sized = [r"\x8a\x09.{8}\x00", *(rf"\x8a\x{size:02x}.{{{size}}}" for size in range(9))]
    texts = "|".join(rf"\x{size:02x}.{{{size}}}" for size in range(256))
    plain = r"h.|j.{4}|[\x94}\](ueas\x86N\x88\x89]|J.{4}|K.|M..|q.|r.{4}|G.{8}|\x95.{8}|\x80."
    one = "|".join([plain, *sized, rf"\x8c(?:{texts})"]).encode()
    return re.compile(one, re.DOTALL), re.compile(rb"(?:%s)*+" % one, re.DOTALL)


class PickleStream:
    """A pickle of plain containers, texts and numbers, of protocol 2 to 5; nothing in it is ever executed.

    Equal texts and lists of the same frames are kept once; of an entry, nothing is kept.

    Attributes:
        position: Bytes read.
        content: What it holds, without the entries; set at its end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = 0
        self.content: Any = None
        self._memo: list[Any] = []
        self._stack: list[Any] = []
        self._outside: list[list[Any]] = []  # the stacks below open marks
        self._in_dict: list[bool] = []  # whether each mark is of a dict's items
        self._places: dict[int, int] = {}  # of lists in the memo
        self._kept: dict[Any, Any] = {}  # texts by themselves, lists by their ids, and by those of what is in them

    def entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the device and each entry of the histories.

        Raises:
            RefusedError: It holds anything else, nests too deeply, or is damaged.
        """
        token, tokens = _tokens()
        data, size = b"", 0
        try:
            while piece := self._file.read(max(_PIECE_BYTES, size - len(data))):
                data += piece
                if not self.position and not self._stack and data[:1] != b"\x80":
                    raise RefusedError("it does not start as a pickle")
                end = size = 0
                while end + size <= len(data):
                    if size:
                        head = 5 if data[end] == 0x58 else 9
                        self._stack.append(data[end + head : end + size].decode("utf-8", "surrogatepass"))
                    end += size
                    run = tokens.match(data, end)
                    assert run is not None  # it may be empty
                    for one in token.findall(run[0]):
                        if self._apply(one):
                            yield self._entry()
                            self._stack[-1] = None  # it was handed on, and is not put into its list
                    end = run.end()
                    if data[end : end + 1] == b".":
                        (self.content,) = self._stack
                        return
                    size = _text_bytes(data, end)
                    if size > _MOST_TEXT_BYTES:
                        raise RefusedError(f"it holds a text that claims {size:,} bytes", self.position + end)
                    if not size:
                        break
                self.position += end
                data = data[end:]
                if len(data) > _LONGEST and not size:
                    raise RefusedError(f"it holds the byte {data[0]:#04x}, which no snapshot has there", self.position)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RefusedError("its opcodes are in an invalid order", self.position) from error
        raise RefusedError("it is cut short", self.position)

    def _apply(self, token: bytes) -> bool:
        """Applies an opcode; returns whether it completes an entry."""
        code, stack = token[0], self._stack
        if code == 0x6A:  # LONG_BINGET
            stack.append(self._memo[int.from_bytes(token[1:], "little")])
        elif code == 0x68:  # BINGET
            stack.append(self._memo[token[1]])
        elif code == 0x94 or code in b"qr":  # MEMOIZE, BINPUT, LONG_BINPUT
            self._keep(stack[-1], len(self._memo) if code == 0x94 else int.from_bytes(token[1:], "little"))
        elif code in b"JKM":
            stack.append(int.from_bytes(token[1:], "little", signed=code == 0x4A))
        elif code == 0x28:  # MARK
            self._in_dict.append(type(stack[-1]) is dict)
            self._outside.append(stack)
            self._stack = []
            if len(self._outside) > DEEPEST:
                raise RefusedError(f"its containers are nested more than {DEEPEST} deep", self.position)
        elif code in b"us":  # SETITEMS, SETITEM
            items = self._taken(2 if code == 0x73 else 0)
            if set(map(type, items[::2])) - {str}:
                raise RefusedError("it holds a dict with keys that are no texts", self.position)
            self._stack[-1].update(zip(items[::2], items[1::2], strict=True))
            return self._is_in_history()
        elif code in b"ea":  # APPENDS, APPEND
            items = self._taken(1 if code == 0x61 else 0)
            self._stack[-1].extend([one for one in items if one is not None] if self._is_in_history() else items)
        elif code in b"}]":
            stack.append({} if code == 0x7D else [])
        elif code == 0x8C:  # SHORT_BINUNICODE
            stack.append(token[2:].decode("utf-8", "surrogatepass"))
        elif code == 0x8A:  # LONG1
            stack.append(int.from_bytes(token[2:], "little", signed=True))
        elif code == 0x86:  # TUPLE2
            pair = tuple(self._taken(2))
            if set(map(type, pair)) != {int}:
                raise RefusedError("it holds a tuple of something else than two whole numbers", self.position)
            self._stack.append(pair)
        elif code == 0x47:
            stack.append(struct.unpack(">d", token[1:])[0])
        elif code in b"N\x88\x89":
            stack.append({0x4E: None, 0x88: True, 0x89: False}[code])
        return False

    def _keep(self, value: Any, place: int) -> None:
        """Puts the value on top of the stack into the memo."""
        if place > self.position + _PIECE_BYTES:
            raise RefusedError(f"it names place {place:,} of its memo after {self.position:,} bytes", self.position)
        self._memo.extend([None] * (place + 1 - len(self._memo)))
        if type(value) is list:
            if self._memo[self._places.get(id(value), place)] is value:
                raise RefusedError("it keeps a list at two places of its memo", self.position)
            self._places[id(value)] = place
        if type(value) is str:
            value = self._stack[-1] = self._kept.setdefault(value, value)
        self._memo[place] = None if type(value) is dict and self._is_in_history() else value  # an entry is handed on

    def _taken(self, count: int) -> list[Any]:
        """Takes some values off the stack, or with 0 all since the last mark."""
        if not count:
            items, self._stack = self._stack, self._outside.pop()
            self._in_dict.pop()
            return items
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def _is_in_history(self) -> bool:
        """Returns whether the value on top of the stack, or just taken off it, is in the dict's histories."""
        if sum(self._in_dict) != 1 or not self._in_dict[0]:
            return False
        items = self._outside[1] if len(self._outside) > 1 else self._stack
        # Of lists with one element, the key, both lists and the entry are on the same stack.
        return next((one for one in reversed(items[-4:]) if type(one) is str), "") == "device_traces"

    def _entry(self) -> tuple[int, dict[str, Any]]:
        """Returns the device and the entry on top of the stack; its frames are those kept of the same."""
        entry = self._stack[-1]
        for key, one in entry.items():
            if type(one) is list and id(one) not in self._kept:
                if len(one) > _MOST_ELEMENTS:
                    raise RefusedError(f"it has a list of {len(one):,} in an entry", self.position)
                entry[key] = kept = self._kept.setdefault(tuple(map(id, one)), one)
                self._kept[id(kept)] = kept
                if (place := self._places.pop(id(one), None)) is not None:
                    self._memo[place] = kept
        # A list of one element has no mark: then its history is on the same stack.
        is_alone = len(self._stack) > 1 and type(self._stack[-2]) is list
        lists = self._stack[:-1] if is_alone else self._outside[-1]
        return (len(lists) - 1 if type(lists[0]) is list else 0), entry


def _text_bytes(data: bytes, at: int) -> int:
    """Returns the bytes of the long text that begins at a position; 0 where none does."""
    width = {0x58: 4, 0x8D: 8}.get(data[at] if at < len(data) else 0, 0)
    return width and 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
