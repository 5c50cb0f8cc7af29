"""One device of a file: its history, its end state, and values derived from both."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.trace.importers.allocations import Allocations, Reserved
from memprof.trace.importers.columns import Annotation, Blocks, Entries
from memprof.trace.importers.facts import DeviceFacts
from memprof.trace.importers.stacks.frames import StackTable
from memprof.trace.schema import Segments


@dataclass(frozen=True, eq=False)
class DeviceHistory:
    """The memory history and end state of one device.

    Attributes:
        number: Its number.
        name: Such as ``cuda:0``.
        entries: Its history.
        segments: Its segments at the end.
        blocks: Their blocks in use.
        annotations: Named time spans, by time.
        stacks: The stacks of its entries and blocks.
        lives: Lives of its blocks.
        reserved: Reserved bytes of the allocator.
        facts: Summary figures.
        remarks: Sentences on what was wrong in the file, and what was done about it.
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
    remarks: tuple[str, ...] = ()
