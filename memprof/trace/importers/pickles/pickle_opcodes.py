"""Validates every opcode of a pickle before anything is loaded: only containers, texts and numbers are allowed."""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass

#: Opcodes by byte, with the pickle module's names.
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}

#: Opcodes that look up a name.
IMPORTING = ("GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID")

#: Maximum nesting depth: a snapshot's frames are at depth 6.
DEEPEST = 64

#: At most one container per this many bytes. Real snapshots hold one in 14 or fewer, and one takes some 80 bytes of
#: memory.
_BYTES_PER_CONTAINER = 6
_FEW_CONTAINERS = 10_000

#: Opcodes that the pattern matches wherever they are complete.
_PLAIN = b"Nhj\x94qKMJG\x88\x89\x95\x8a\x8c"

_CONTAINER_OPCODES = (b"]", b"}", b"\x86")


@dataclass(frozen=True)
class RefusedError(Exception):
    """The reason a pickle is rejected.

    Attributes:
        reason: A clause, such as "it imports os.system (opcode GLOBAL)".
        position: Byte offset of the problem.
        has_name: The pickle requests an import at that offset; the name is still to be read.
    """

    reason: str
    position: int = 0
    has_name: bool = False


def _grammar() -> re.Pattern[bytes]:
    """Builds the regular expression for nearly all of a snapshot, matched at the speed of C.

    Every match is a run of whole opcodes with their arguments: numbers, short texts, references to the
    memo, and dicts and lists of those up to an entry of a history with its frames.
    """
    sizes = b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(1, 9))
    whole = rb"K.|M..|J.{4}|\x8a(?:\x00|" + sizes + rb"|\x09.{8}\x00)"
    frame = rb"\x95.{8}"
    pair = rb"(?=[KMJ\x8a\x95])(?:%s)?(?:%s)(?:%s)?\x86" % (frame, whole, frame)
    numbers = rb"(?:%s)(?:%s)?+" % (whole, pair)  # one, or a pair
    texts = b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(256))
    plain = rb"h.|j.{4}|\x94|%s|\x8c(?:%s)|q.|[N\x88\x89]|G.{8}|%s" % (numbers, texts, frame)
    put = rb"(?:\x94|q.)?+"
    flat_dict = rb"\}%s\((?:%s)*+u" % (put, plain)
    flat_list = rb"\]%s\((?:%s|%s)*+e|\]%s(?:%s)*+a|\]%s" % (put, plain, flat_dict, put, plain, put)
    entry = rb"\}%s\((?:%s|%s)*+u" % (put, plain, flat_list)
    # Bounded, so that progress can be reported.
    return re.compile(rb"(?:%s|%s){0,100000}+" % (entry, plain), re.DOTALL)


_RUN: re.Pattern[bytes] | None = None


def check_opcodes(data: bytes, on_progress: Callable[[float], None] = lambda share: None) -> None:
    """Checks that a pickle consists of plain containers, texts and numbers, and that loading it takes bounded memory.

    Args:
        data: The pickle, protocol 2 to 5.
        on_progress: Called from time to time with the share checked.

    Raises:
        RefusedError: It holds anything else, nests too deeply, claims too much, is cut short, or has trailing data.
    """
    global _RUN  # noqa: PLW0603 - compiled when the first snapshot is read, not at every start
    _RUN = _RUN or _grammar()
    if not (len(data) > 1 and data[0] == 0x80 and 2 <= data[1] <= 5):
        raise RefusedError("it does not start as a pickle")
    containers = sum(data.count(opcode) for opcode in _CONTAINER_OPCODES)
    # Arguments may contain such bytes by chance.
    if containers > len(data) / _BYTES_PER_CONTAINER + _FEW_CONTAINERS:
        raise RefusedError(f"it makes up to {containers:,} containers in {len(data):,} bytes, which no snapshot does")
    check_end(data, _Machine(data, on_progress).run(_RUN))


def check_end(data: bytes, end: int) -> None:
    """Checks that nothing follows a pickle's end but zeros, with which torch pads the pickle in a page.

    Raises:
        RefusedError: Something does.
    """
    if data.count(b"\0", end) != len(data) - end:
        more = "another pickle follows" if data[end : end + 1] == b"\x80" else f"{len(data) - end:,} bytes follow"
        raise RefusedError(f"{more} after its end", end)


class _Machine:
    """Walks what the pattern does not match, opcode by opcode, tracking depth and memo entries."""

    def __init__(self, data: bytes, on_progress: Callable[[float], None]) -> None:
        self.data = data
        self.size = len(data)
        self.on_progress = on_progress
        self.depths = [0]  # for each open mark, the depth of what was built since

    def run(self, pattern: re.Pattern[bytes]) -> int:
        """Walks to the end; returns the position after STOP."""
        data, match, position, reported = self.data, pattern.match, 2, 0
        while True:
            found = match(data, position)
            if found is not None and found.end() > position:
                position = found.end()
                if self.depths[-1] < 3:  # what the pattern matches nests no deeper
                    self.depths[-1] = 3
                if position - reported > 4_000_000:
                    reported = position
                    self.on_progress(position / self.size)
                if position < self.size and data[position] in _PLAIN:
                    continue  # the pattern reached its bound, or a number it does not match
            if position >= self.size:
                raise RefusedError("it is cut short", position)
            opcode = data[position]
            if opcode == 0x2E:  # STOP
                if len(self.depths) > 1:
                    raise RefusedError("its marks do not match", position)
                return position + 1
            position = self._step(opcode, position)
            if position > self.size:
                raise RefusedError("it is cut short", self.size)

    def _step(self, opcode: int, position: int) -> int:
        """Checks one opcode that the pattern does not match here; returns the position after it and its argument."""
        depths = self.depths
        if opcode == 0x28:  # MARK
            depths.append(0)
            if len(depths) > DEEPEST:
                raise RefusedError(f"its containers are nested more than {DEEPEST} deep", position)
        elif opcode in b"eu":  # APPENDS, SETITEMS
            if len(depths) == 1:
                raise RefusedError("its marks do not match", position)
            self._deepen(depths.pop() + 1, position, replaces=False)
        elif opcode in b"as":  # APPEND, SETITEM
            self._deepen(depths[-1] + 1, position, replaces=True)
        elif opcode in b"t)\x85\x86\x87":
            # Tuples used as keys are hashed whole: a few nested ones can take practically forever.
            raise RefusedError("it holds a tuple of something else than two whole numbers", position)
        elif opcode in b"]}":
            pass
        elif opcode in _PLAIN:
            return self._plain(opcode, position)
        elif opcode in b"X\x8d\x8br":
            return self._sized(opcode, position)
        else:
            self._refuse(opcode, position)
        return position + 1

    def _deepen(self, depth: int, position: int, *, replaces: bool) -> None:
        deepest = depth if replaces else max(self.depths[-1], depth)
        if deepest > DEEPEST:
            raise RefusedError(f"its containers are nested more than {DEEPEST} deep", position)
        self.depths[-1] = deepest

    def _plain(self, opcode: int, position: int) -> int:
        """Handles an opcode that the pattern matches elsewhere: it is cut short here, or an integer is too long."""
        if opcode == 0x8A and position + 1 < self.size and self.data[position + 1] > 8:
            raise RefusedError(f"it holds a whole number of {self.data[position + 1]} bytes (opcode LONG1)", position)
        raise RefusedError("it is cut short", position)

    def _sized(self, opcode: int, position: int) -> int:
        """Handles a text or number with an explicit length, or an explicit memo index."""
        width = 8 if opcode == 0x8D else 4
        argument = int.from_bytes(self.data[position + 1 : position + 1 + width], "little")
        if opcode == 0x72:  # LONG_BINPUT: the memo is an array as long as the highest index used
            if argument > position:
                raise RefusedError(f"it names place {argument:,} of its memo after {position:,} bytes", position)
            return position + 5
        if opcode == 0x8B:
            raise RefusedError(f"it holds a whole number of {argument:,} bytes (opcode LONG4)", position)
        if position + 1 + width + argument > self.size:
            raise RefusedError(f"it holds a text that claims {argument:,} bytes, more than the file has", position)
        return position + 1 + width + argument

    def _refuse(self, opcode: int, position: int) -> None:
        name = _NAMES.get(opcode)
        if name is None:
            raise RefusedError(f"it holds byte {opcode:#04x}, which is not a pickle opcode", position)
        raise RefusedError(f"it holds the opcode {name}, which no snapshot has", position, has_name=name in IMPORTING)
