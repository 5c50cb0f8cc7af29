"""The part of the allocator model that its modules modify: segments, blocks, and the reserved bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from memprof.replay.allocator.blocks import FREE, Block, Pool, Segment
from memprof.replay.allocator.rules import Settings


class AllocatorState(Protocol):
    """The allocator model's interface for mapping, unmapping and releasing memory.

    Attributes:
        settings: The allocator's settings.
        reserved: Bytes reserved on the device.
        segments: Segments by address.
    """

    settings: Settings
    reserved: int
    segments: dict[int, Segment]

    def pools(self) -> Iterator[Pool]:
        """Yields every pool."""

    def has_room(self, size: int) -> bool:
        """Whether the device has that many bytes left."""

    def make_block(self, address: int, size: int, segment: Segment, state: int = FREE) -> Block:
        """Adds a block to a segment."""

    def absorb_before(self, block: Block, previous: Block) -> None:
        """Merges a block with the one before it."""

    def absorb_behind(self, block: Block, following: Block) -> None:
        """Merges a block with the one after it."""

    def write(self, action: str, address: int, size: int, stream: int) -> None:
        """Logs a segment event."""
