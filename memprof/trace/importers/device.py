"""One device of a file: its history, its end state, and summary figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from memprof.json_values import Json, to_json
from memprof.trace.importers.allocations import Allocations, Reserved, find_lives
from memprof.trace.importers.columns import (
    ALLOC,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_GROWS,
    SEGMENT_SHRINKS,
    Annotation,
    Blocks,
    Entries,
)
from memprof.trace.importers.frames import StackTable
from memprof.trace.importers.phases import FindPhases
from memprof.trace.manifest import Backend
from memprof.trace.schema import ACTIONS, NONE, Ints, Segments

#: The number of host memory as a device, as torch writes it, and its name.
HOST, HOST_NAME = -1, "host"
#: What a memory profile (``torch.profiler``) knows of the time before it, as a clause.
PROFILED_START = (
    "memory from before the profiler began is in it only where an operator uses it: the peak is a lower bound"
)


@dataclass(frozen=True, eq=False)
class DeviceHistory:
    """The memory history and end state of one device.

    Attributes:
        number: Its number; HOST for pinned memory of the host, whose device is ``cpu``.
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

    @classmethod
    def profiled(
        cls,
        number: int,
        name: str,
        entries: Entries,
        blocks: Blocks,
        stacks: StackTable,
        reserved: Reserved | None = None,
        *,
        knows_start: bool = False,
        remarks: tuple[str, ...] = (),
    ) -> DeviceHistory:
        """Returns a device of a profile, which shows no segments, and of the end only what nothing in it frees.

        Args:
            number: Its number.
            name: Its name.
            entries: Its history.
            blocks: What is in use at the end without an entry.
            stacks: The stacks of its entries.
            reserved: Reserved bytes; None where the profile does not count them.
            knows_start: The profile shows what was in use before it began.
            remarks: Sentences on the file.
        """
        lives, segments = find_lives(entries, blocks, rounding=1), Segments.empty()
        reserved = reserved or Reserved.unknown(len(entries))
        end = Blocks.of_sizes(lives.requested[lives.free == NONE])
        placed = int((blocks.address != NONE).sum())
        facts = find_facts(name, entries, segments, end, placed, lives, reserved, knows_start=knows_start)
        return cls(number, name, entries, segments, blocks, [], stacks, lives, reserved, facts, remarks)


@dataclass(frozen=True, eq=False)
class Profile:
    """A device as a profile shows it.

    Attributes:
        history: Its history, with what to know of the file as remarks.
        backend: What such a file contains.
        reason: Why the capture is incomplete, a clause; "" where it is complete.
        find_phases: Derives the steps and phases of its operators.
        has_addresses: The file contains addresses.
        device_name: Name of the device.
    """

    history: DeviceHistory
    backend: Backend
    reason: str
    find_phases: FindPhases
    has_addresses: bool
    device_name: str


@dataclass(frozen=True)
class OutOfMemory:
    """A failed memory request.

    Attributes:
        entry: Its index in the history.
        requested_bytes: Requested bytes.
        free_bytes: Free bytes of the device.
        source: The caller as file, line and function; "" without a stack.
    """

    entry: int
    requested_bytes: int
    free_bytes: int
    source: str


@dataclass(frozen=True)
class DeviceFacts:
    """One device of a file; bytes are requested bytes where the name says so, else allocated bytes; NONE if unknown.

    Attributes:
        device: Its name, such as ``cuda:0``.
        entries: Entries of its history.
        actions: Number of entries by action.
        segments: Segments at the end.
        expandable_segments: How many of them are expandable.
        blocks: Blocks in them, in use or not.
        end_requested_bytes: Requested bytes in use at the end.
        end_allocated_bytes: Allocated bytes in use at the end.
        end_active_bytes: The same, including blocks pending free.
        end_active_requested_bytes: Requested bytes of those.
        end_reserved_bytes: Bytes of all segments.
        start_requested_bytes: Requested bytes in use before the first entry, computed backwards from the end.
        start_allocated_bytes: Allocated bytes in use before the first entry.
        start_reserved_bytes: Bytes of segments before the first entry.
        peak_requested_bytes: Peak requested bytes in the window.
        peak_allocated_bytes: Peak allocated bytes in the window.
        peak_reserved_bytes: Peak reserved bytes in the window.
        history_complete: Recording began before the first allocation: nothing was allocated at the start.
        has_timeline: There is a history: at least two entries.
        missing_actions: Actions that were not recorded (``skip_actions``), so that figures of the window are wrong.
        out_of_memory: Failed requests.
    """

    device: str
    entries: int
    actions: dict[str, int]
    segments: int
    expandable_segments: int
    blocks: int
    end_requested_bytes: int
    end_allocated_bytes: int
    end_active_bytes: int
    end_active_requested_bytes: int
    end_reserved_bytes: int
    start_requested_bytes: int
    start_allocated_bytes: int
    start_reserved_bytes: int
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    history_complete: bool
    has_timeline: bool
    missing_actions: tuple[str, ...]
    out_of_memory: tuple[OutOfMemory, ...]

    def to_json(self) -> Json:
        """Returns the figures as JSON containers."""
        found: Json = to_json(self)
        return found | {name: None for name, value in found.items() if value == NONE}


def find_facts(
    device: str,
    entries: Entries,
    segments: Segments,
    blocks: Blocks,
    all_blocks: int,
    lives: Allocations,
    reserved: Reserved,
    *,
    knows_start: bool = True,
) -> DeviceFacts:
    """Computes the figures of one device.

    Args:
        device: Its name.
        entries: Its history.
        segments: Its segments at the end.
        blocks: Their blocks in use.
        all_blocks: Number of blocks, in use or not.
        lives: Lives of its blocks.
        reserved: Reserved bytes.
        knows_start: Everything that was in use before the first entry is among the lives.
    """
    held = _held_bytes(lives, lives.requested, len(entries))
    missing = _missing_actions(entries, segments, lives)
    counted = Counter(entries.action.tolist())
    actions = {name: counted[code] for code, name in enumerate(ACTIONS) if counted[code]} | entries.unknown
    start, allocated = int(held[0]), _held_bytes(lives, lives.allocated, len(entries))
    return DeviceFacts(
        device=device,
        entries=len(entries) + sum(entries.unknown.values()),
        actions=actions,
        segments=len(segments),
        expandable_segments=int(segments.is_expandable.sum()),
        blocks=all_blocks,
        end_requested_bytes=int(blocks.requested[~blocks.is_pending].sum()),
        end_allocated_bytes=int(blocks.size[~blocks.is_pending].sum()),
        end_active_bytes=int(blocks.size.sum()),
        end_active_requested_bytes=int(blocks.requested.sum()),
        end_reserved_bytes=reserved.end,
        start_requested_bytes=start if knows_start else NONE,
        start_allocated_bytes=int(allocated[0]) if knows_start else NONE,
        start_reserved_bytes=reserved.start,
        peak_requested_bytes=int(held.max()),
        peak_allocated_bytes=int(allocated.max()),
        peak_reserved_bytes=reserved.peak,
        history_complete=knows_start and len(entries) > 1 and start == 0 and reserved.start <= 0 and not missing,
        has_timeline=len(entries) > 1,
        missing_actions=missing,
        out_of_memory=tuple(
            OutOfMemory(row, int(entries.size[row]), int(entries.address[row]), entries.stacks[row].place)
            for row in np.flatnonzero(entries.action == OOM).tolist()
        ),
    )


def _held_bytes(lives: Allocations, size: Ints, entries: int) -> Ints:
    """Returns the bytes held before the first entry and after each, shape ``(entries + 1,)``."""
    born, freed = lives.alloc != NONE, lives.free != NONE
    change = np.zeros(entries + 1, dtype=np.int64)
    np.add.at(change, lives.alloc[born] + 1, size[born])
    np.subtract.at(change, lives.free[freed] + 1, size[freed])
    change[0] = size[~born].sum()
    held: Ints = np.cumsum(change)
    return held


def _missing_actions(entries: Entries, segments: Segments, lives: Allocations) -> tuple[str, ...]:
    """Returns the actions that the history must have left out; one of a free's two entries is enough."""
    is_alloc = entries.action == ALLOC
    is_free = np.isin(entries.action, (FREE, FREE_REQUESTED, FREE_COMPLETED))
    missing = []
    if is_free.any() and not is_alloc.any() and len(entries) > 1:
        missing.append("alloc")
    if is_alloc.any() and not is_free.any() and lives.clashes:
        missing += ["free_requested", "free_completed"]
    grows, shrinks = np.isin(entries.action, SEGMENT_GROWS), np.isin(entries.action, SEGMENT_SHRINKS)
    if not shrinks.any() and len(segments):
        # Memory was allocated where no segment is at the end: a segment was released.
        first = np.concatenate([segments.address, entries.address[grows]])
        behind = first + np.concatenate([segments.total_size_bytes, entries.size[grows]])
        order = np.argsort(first, kind="stable")
        place = order[np.maximum(np.searchsorted(first[order], entries.address[is_alloc], side="right") - 1, 0)]
        address = entries.address[is_alloc]
        if ((address < first[place]) | (address >= behind[place])).any():
            missing.append("segment_free")
    return tuple(missing)
