"""Writes a memory snapshot like ``torch.cuda.memory._dump_snapshot()`` for torch's own ``_memory_viz`` to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from memprof.trace.exporters.pickle_writer import Cells, PickleWriter, Shared
from memprof.trace.schema import Annotations, Floats, Ints, Segments, Stacks, Texts

#: Keys of an event.
_KEYS = (
    "action",
    "addr",
    "device_free",
    "size",
    "stream",
    "time_us",
    "compile_context",
    "user_metadata",
    "pool_id",
    "frames",
)
#: Times that a whole number of 8 bytes holds.
_MOST_US = 2.0**62
#: States of a block in a snapshot.
ACTIVE, PENDING, INACTIVE = "active_allocated", "active_pending_free", "inactive"


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of some segments, by address; each of shape ``(blocks,)``.

    Attributes:
        segment: Row of its segment.
        address: First byte.
        size: Size in bytes.
        requested: Requested bytes.
        state: ACTIVE, PENDING or INACTIVE.
        stack_id: Allocation stack, NONE where unknown.
    """

    segment: Ints
    address: Ints
    size: Ints
    requested: Ints
    state: Texts
    stack_id: Ints


Codes = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class EventRows:
    """Some consecutive events; each of shape ``(events,)``.

    Attributes:
        action: Action, as an index into the history's ``actions``.
        address: First byte; of an ``oom``, the free bytes of the device.
        size: Size in bytes.
        stream: The stream.
        time_us: Time, NaN where unknown.
        stack_id: Stack, NONE where unknown.
        note: Index into ``notes``.
        context: Index into ``contexts``.
        pool: Index into ``pools``.
    """

    action: Codes
    address: Ints
    size: Ints
    stream: Ints
    time_us: Floats
    stack_id: Ints
    note: Codes
    context: Codes
    pool: Codes

    def take(self, rows: slice) -> EventRows:
        """Returns some of the events."""
        return EventRows(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})


@dataclass(frozen=True, eq=False)
class History:
    """The events of a device, in order.

    Attributes:
        actions: Names of the actions that may occur.
        notes: What events refer to, in words; "" for nothing.
        contexts: Names of compiled regions; "" for none.
        pools: Memory pools, as ``0,0``; "" for the default one.
        chunks: The events, generated chunk by chunk.
    """

    actions: Sequence[str]
    notes: Sequence[str]
    contexts: Sequence[str]
    pools: Sequence[str]
    chunks: Iterable[EventRows]


@dataclass(frozen=True, eq=False)
class DeviceSnapshot:
    """Snapshot data of one device.

    Attributes:
        number: The device's number.
        history: Its history.
        segments: Its segments at the end.
        blocks: Their blocks.
        annotations: Named time spans.
    """

    number: int
    history: History
    segments: Segments
    blocks: Blocks
    annotations: Annotations


def write_snapshot(file: BinaryIO, devices: Sequence[DeviceSnapshot], stacks: Stacks, settings: str = "") -> None:
    """Writes a snapshot as a pickle of dictionaries, lists, texts and numbers, holding one chunk of events in memory.

    Args:
        file: The destination.
        devices: The devices.
        stacks: The stacks that events and blocks refer to.
        settings: The value of ``PYTORCH_ALLOC_CONF``.
    """
    writer = PickleWriter(file)
    frames = [_frames(str(text)) for text in stacks.frames]
    words = _vocabulary(devices)
    pools = sorted({pool for device in devices for pool in device.history.pools})
    numbers = writer.share("segments", [*words, *map(_pool_id, pools), *frames, []])
    of_word = dict(zip(words, numbers.tolist(), strict=False))
    of_pool = dict(zip(pools, numbers[len(words) :].tolist(), strict=False))
    of_stack = numbers[len(words) + len(pools) :]  # NONE (-1) is the last: no frames
    writer.item("segments", [segment for device in devices for segment in _segments(device, of_stack)])
    by_number = {device.number: device for device in devices}
    writer.lists_of_rows(
        "device_traces",
        (
            _history(by_number[number].history, of_word, of_pool, of_stack) if number in by_number else ()
            for number in range(1 + max(by_number, default=-1))
        ),
    )
    writer.item(
        "allocator_settings",
        {"PYTORCH_CUDA_ALLOC_CONF": settings, "expandable_segments": "True" in settings},
    )
    writer.item("external_annotations", [one for device in devices for one in _annotations(device)])
    writer.end()


def _vocabulary(devices: Sequence[DeviceSnapshot]) -> list[str]:
    """Returns the texts that events refer to, each once."""
    every = dict.fromkeys(_KEYS)
    for device in devices:
        history = device.history
        every.update(dict.fromkeys([*history.actions, *history.notes, *map(_context, history.contexts)]))
    return list(every)


def _history(
    history: History, of_word: Mapping[str, int], of_pool: Mapping[str, int], of_stack: Ints
) -> Iterator[list[tuple[Cells, Cells]]]:
    """Yields the columns of each chunk of events."""
    actions = np.array([of_word[action] for action in history.actions], dtype=np.int64)
    notes = np.array([of_word[note] for note in history.notes], dtype=np.int64)
    contexts = np.array([of_word[_context(text)] for text in history.contexts], dtype=np.int64)
    pools = np.array([of_pool[pool] for pool in history.pools], dtype=np.int64)
    address_keys = np.array([of_word["device_free" if one == "oom" else "addr"] for one in history.actions])
    for events in history.chunks:
        values = {
            "action": Cells(actions[events.action], is_shared=True),
            "addr": Cells(events.address),
            "size": Cells(events.size),
            "stream": Cells(events.stream),
            "time_us": Cells(_whole(events.time_us)),
            "compile_context": Cells(contexts[events.context], is_shared=True),
            "user_metadata": Cells(notes[events.note], is_shared=True),
            "pool_id": Cells(pools[events.pool], is_shared=True),
            "frames": Cells(of_stack[events.stack_id], is_shared=True),
        }
        count = len(events.action)
        keys = {name: Cells(np.full(count, of_word[name]), is_shared=True) for name in values}
        keys["addr"] = Cells(address_keys[events.action], is_shared=True)
        yield [(keys[name], values[name]) for name in values]


def _whole(time_us: Floats) -> Ints:
    """Returns whole microseconds; 0 where unknown."""
    whole: Ints = np.clip(np.where(np.isnan(time_us), 0.0, time_us), -_MOST_US, _MOST_US).astype(np.int64)
    return whole


def _context(text: str) -> str:
    return text or "N/A"


def _annotations(device: DeviceSnapshot) -> list[dict[str, Any]]:
    table = device.annotations
    ends = [
        {"name": name, "stage": stage, "device": device.number, "time_us": int(moment)}
        for stage, moments in (("START", table.start_us.tolist()), ("END", table.end_us.tolist()))
        for name, moment in zip(table.name.tolist(), moments, strict=True)
        if moment == moment
    ]
    return sorted(ends, key=lambda one: one["time_us"])


def _pool_id(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    return (int(first), int(second)) if first and second else (0, 0)


def _segments(device: DeviceSnapshot, of_stack: Ints) -> list[dict[str, Any]]:
    table, blocks = device.segments, device.blocks
    inside: list[list[dict[str, Any]]] = [[] for _ in range(len(table))]
    for segment, address, size, requested, state, stack in zip(
        blocks.segment.tolist(),
        blocks.address.tolist(),
        blocks.size.tolist(),
        blocks.requested.tolist(),
        blocks.state.tolist(),
        blocks.stack_id.tolist(),
        strict=True,
    ):
        inside[segment].append(
            {
                "address": address,
                "size": size,
                "requested_size": requested,
                "state": state,
                "frames": Shared(int(of_stack[stack])),
            }
        )
    return [
        {
            "device": device.number,
            "address": int(table.address[row]),
            "total_size": int(table.total_size_bytes[row]),
            "allocated_size": int(table.allocated_size_bytes[row]),
            "active_size": int(table.active_size_bytes[row]),
            "requested_size": int(table.requested_size_bytes[row]),
            "stream": int(table.stream[row]),
            "segment_type": str(table.segment_type[row]),
            "segment_pool_id": _pool_id(str(table.segment_pool[row])),
            "is_expandable": bool(table.is_expandable[row]),
            "frames": [],
            "blocks": held,
        }
        for row, held in enumerate(inside)
    ]


def _frames(text: str) -> list[dict[str, Any]]:
    """Reads ``file:line:function`` lines, innermost first."""
    frames = []
    for line in text.splitlines():
        file, number, name = ["", "", *line.rsplit(":", 2)][-3:]
        known = number.isdecimal()
        frames.append({"filename": file if known else line, "line": int(number) if known else 0, "name": name})
    return frames
