"""The allocator's data structures: blocks that tile segments, the free ones, and the whole state."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from memprof.replay.allocator.rules import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, Settings, TieBreak

#: States of a block. A pending one is freed, but another stream may still use it (pending free).
FREE, ALLOCATED, PENDING, UNMAPPED = 0, 1, 2, 3
_ADDRESS_BITS = 64
_COUNTER_BITS = 40


class Segment:
    """An address range reserved on the device; an expandable one grows in place.

    Attributes:
        address: First byte.
        size: Bytes reserved; of an expandable one, the bytes of its range, mapped or not.
        pool: Its pool.
        counter: Its index in order of reservation.
        is_expandable: Whether it grows in place.
        first: Its first block.
    """

    __slots__ = ("address", "counter", "first", "is_expandable", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool, counter: int, *, is_expandable: bool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.counter = counter
        self.is_expandable = is_expandable
        self.first: Block | None = None

    def blocks(self) -> Iterator[Block]:
        """Iterates over its blocks in address order."""
        block = self.first
        while block is not None:
            yield block
            block = block.next


class Block:
    """A free or allocated part of a segment.

    Attributes:
        address: First byte.
        size: Bytes.
        requested: Bytes last requested.
        state: FREE, ALLOCATED, PENDING or UNMAPPED.
        previous: The block before it in its segment.
        next: The block after it.
        segment: Its segment.
        counter: Its index in order of creation.
        key: Its sort key in its pool while it is free.
        age_base: Number of searches of its pool before it became free.
        allocation: The allocation it last served, -1 for none.
    """

    __slots__ = (
        "address",
        "age_base",
        "allocation",
        "counter",
        "key",
        "next",
        "previous",
        "requested",
        "segment",
        "size",
        "state",
    )

    def __init__(self, address: int, size: int, segment: Segment, counter: int, state: int = FREE) -> None:
        self.address = address
        self.size = size
        self.segment = segment
        self.counter = counter
        self.state = state
        self.requested = 0
        self.previous: Block | None = None
        self.next: Block | None = None
        self.key = 0
        self.age_base = 0
        self.allocation = -1

    def is_split(self) -> bool:
        """Returns whether it is only part of its segment."""
        return self.previous is not None or self.next is not None

    def place_between(self, previous: Block | None, following: Block | None) -> None:
        """Links it between two blocks, or at an end of its segment."""
        self.previous, self.next = previous, following
        if previous is None:
            self.segment.first = self
        else:
            previous.next = self
        if following is not None:
            following.previous = self


class Pool:
    """The free blocks of one stream, size class and memory pool, in torch's search order.

    A block's key is a number: its size, then the tie break. Keys are kept in sorted lists, one for each sixteenth of
    the way from a power of two to the next, so lists stay short however many blocks are free; a bit mask of the
    non-empty lists gives the next one to search.

    Attributes:
        owner: Number of the memory pool (0 is the default pool; CUDA graphs have their own).
        stream: The stream.
        is_small: Whether it serves small requests.
        page_bytes: Growth unit of its expandable segments.
        searches: Number of searches, for garbage collection.
        unmapped: Blocks of expandable segments with addresses but no memory, by address.
    """

    def __init__(self, owner: int, stream: int, tie_break: TieBreak, *, is_small: bool) -> None:
        self.owner = owner
        self.stream = stream
        self.is_small = is_small
        self.page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self.searches = 0
        self.unmapped: dict[int, Block] = {}
        self._tie_break = tie_break
        self._shift = _ADDRESS_BITS + (_COUNTER_BITS if tie_break == "segment" else 0)
        self._lists: dict[int, list[int]] = {}
        self._filled = 0
        self._by_key: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Adds a block to the free ones."""
        size = block.size
        if self._tie_break == "address":
            key = size << _ADDRESS_BITS | block.address
        elif self._tie_break == "block":
            key = size << _ADDRESS_BITS | block.counter
        else:
            key = (size << _COUNTER_BITS | block.segment.counter) << _ADDRESS_BITS | block.address
        block.key = key
        block.age_base = self.searches
        self._by_key[key] = block
        number = _list_of(size)
        keys = self._lists.get(number)
        if keys:
            insort(keys, key)
        else:
            self._lists[number] = [key]
            self._filled |= 1 << number

    def remove(self, block: Block) -> None:
        """Removes a block from the free ones; its size must be unchanged since it was added."""
        key = block.key
        del self._by_key[key]
        number = _list_of(block.size)
        keys = self._lists[number]
        if len(keys) == 1:
            keys.clear()
            self._filled ^= 1 << number
        else:
            del keys[bisect_left(keys, key)]

    def fitting(self, size: int) -> Block | None:
        """Returns the smallest free block of at least a size; None for none."""
        number, place = self._find(size)
        return None if number < 0 else self._by_key[self._lists[number][place]]

    def take(self, size: int) -> Block | None:
        """Removes and returns the smallest free block of at least a size; None for none."""
        number, place = self._find(size)
        if number < 0:
            return None
        keys = self._lists[number]
        key = keys.pop(place)
        if not keys:
            self._filled ^= 1 << number
        return self._by_key.pop(key)

    def _find(self, size: int) -> tuple[int, int]:
        """Returns the list with the smallest key of at least a size, -1 for none, and the key's place in it."""
        number = _list_of(size)
        keys = self._lists.get(number)
        if keys:
            place = bisect_left(keys, size << self._shift)
            if place < len(keys):
                return number, place
        larger = self._filled >> (number + 1)
        return (number + (larger & -larger).bit_length(), 0) if larger else (-1, 0)

    def from_size(self, size: int) -> Iterator[Block]:
        """Iterates over the free blocks of at least a size, smallest first; the pool must not change meanwhile."""
        number = _list_of(size)
        keys = self._lists.get(number)
        if keys:
            for place in range(bisect_left(keys, size << self._shift), len(keys)):
                yield self._by_key[keys[place]]
        larger = self._filled >> (number + 1)
        while larger:
            step = (larger & -larger).bit_length()
            number += step
            for key in self._lists[number]:
                yield self._by_key[key]
            larger >>= step

    def free_blocks(self) -> list[Block]:
        """Returns the free blocks, smallest first."""
        return [self._by_key[key] for number in sorted(self._lists) for key in self._lists[number]]

    def largest(self) -> Block | None:
        """Returns the largest free block."""
        return self._by_key[self._lists[self._filled.bit_length() - 1][-1]] if self._filled else None


def _list_of(size: int) -> int:
    bits = size.bit_length()
    return bits << 4 | (size >> (bits - 5)) & 15


class AllocatorState(Protocol):
    """What mapping, unmapping and releasing memory need of the allocator model, which imports them."""

    settings: Settings
    reserved: int
    segments: dict[int, Segment]

    def pools(self) -> Iterator[Pool]:
        """Yields every pool."""

    def has_room(self, size: int) -> bool:
        """Whether the device has that many bytes left."""

    def make_block(self, address: int, size: int, segment: Segment, state: int = FREE) -> Block:
        """Adds a block to a segment."""

    def write(self, action: str, address: int, size: int, stream: int) -> None:
        """Logs a segment event."""
