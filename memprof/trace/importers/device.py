"""One device of a file: its history, its end state, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.trace.importers.allocations import Allocations, Reserved
from memprof.trace.importers.columns import Annotation, Blocks, Entries
from memprof.trace.importers.facts import DeviceFacts
from memprof.trace.importers.frames import StackTable
from memprof.trace.schema import Segments


@dataclass(frozen=True, eq=False)
class DeviceHistory:
    """What happened to the memory of one device, and how it ended.

    Attributes:
        number: Its number.
        name: Such as ``cuda:0``.
        entries: Its history.
        segments: Its segments at the end.
        blocks: Their blocks in use.
        annotations: Named stretches of time, by time.
        stacks: The stacks of its entries and blocks.
        lives: What was alive when.
        reserved: What the allocator held.
        facts: All of it in figures.
    """

    number: int
    name: str
    entries: Entries
    segments: Segments
    blocks: Blocks
    annotations: list[Annotation]
    stacks: StackTable
    lives: Allocations
    reserved: Reserved
    facts: DeviceFacts
