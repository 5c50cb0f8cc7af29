"""Writes a memory snapshot like ``torch.cuda.memory._dump_snapshot()`` for torch's own ``_memory_viz`` to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int, str, int]]) -> Blocks:
        """Builds the table from rows in the order of its columns."""
        columns = list(zip(*rows, strict=True)) or [()] * 6
        types = (np.int64, np.int64, np.int64, np.int64, np.object_, np.int64)
        return cls(*(np.array(column, dtype=kind) for column, kind in zip(columns, types, strict=True)))


#: Columns of some consecutive events by the key that a snapshot has for each; those that texts are shared of are codes.
#: ``addr`` is the free bytes of the device for an ``oom``, ``frames`` the stack or NONE, ``time_us`` NaN where unknown.
EventRows = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class History:
    """The events of a device, in order.

    Attributes:
        actions: Names of the actions that may occur.
        notes: What is noted of events, as texts or by key; "" for nothing.
        contexts: Names of compiled regions; "" for none.
        pools: Memory pools, as ``0,0``; "" for the default one.
        chunks: The events, generated chunk by chunk; ``action``, ``user_metadata``, ``compile_context`` and ``pool_id``
            are indices into the above.
    """

    actions: Sequence[str]
    notes: Sequence[str | Mapping[str, str]]
    contexts: Sequence[str]
    pools: Sequence[str]
    chunks: Iterable[EventRows]


@dataclass(frozen=True, eq=False)
class DeviceSnapshot:
    """Snapshot data of one device."""

    number: int
    history: History
    segments: Segments
    blocks: Blocks
    annotations: Annotations


def write_snapshot(file: BinaryIO, device: DeviceSnapshot, stacks: Stacks, settings: str = "") -> None:
    """Writes a snapshot as a pickle of dictionaries, lists, texts and numbers, holding one chunk of events in memory.

    Args:
        file: The destination.
        device: Its device.
        stacks: The stacks that events and blocks refer to.
        settings: The value of ``PYTORCH_ALLOC_CONF``.
    """
    writer, history = PickleWriter(file), device.history
    frames = [_frames(str(text)) for text in stacks.frames]
    contexts = [text or "N/A" for text in history.contexts]
    # Values that events refer to. NONE (-1) is the last of the stacks: no frames.
    shared = [_KEYS, history.actions, history.notes, contexts, [*map(_pool_id, history.pools)], [*frames, []]]
    numbers = writer.share("segments", [value for values in shared for value in values])
    parts = np.split(numbers, np.cumsum([len(values) for values in shared])[:-1])
    writer.item("segments", _segments(device, parts[-1]))
    empty: list[tuple[()]] = [()] * device.number
    writer.lists_of_rows("device_traces", [*empty, _history(history, *parts)])
    writer.item(
        "allocator_settings",
        {"PYTORCH_CUDA_ALLOC_CONF": settings, "expandable_segments": "True" in settings},
    )
    writer.item("external_annotations", _annotations(device))
    writer.end()


def _history(
    history: History, key_numbers: Ints, actions: Ints, notes: Ints, contexts: Ints, pools: Ints, stacks: Ints
) -> Iterator[list[tuple[Cells, Cells]]]:
    """Yields the columns of each chunk of events."""
    of_key = dict(zip(_KEYS, key_numbers.tolist(), strict=True))
    address_keys = np.array([of_key["device_free" if one == "oom" else "addr"] for one in history.actions])
    shared = dict(
        zip(("action", "user_metadata", "compile_context", "pool_id"), (actions, notes, contexts, pools), strict=True)
    )
    shared["frames"] = stacks
    for events in history.chunks:
        values = {name: events[name] for name in _KEYS if name in events} | {"time_us": _whole(events["time_us"])}
        keys = {name: Cells(np.full(len(values["size"]), of_key[name]), is_shared=True) for name in values}
        keys["addr"] = Cells(address_keys[events["action"]], is_shared=True)
        cells = {
            name: Cells(shared[name][one], is_shared=True) if name in shared else Cells(one)
            for name, one in values.items()
        }
        yield [(keys[name], cells[name]) for name in values]


def _whole(time_us: Floats) -> Ints:
    """Returns whole microseconds; 0 where unknown."""
    whole: Ints = np.clip(np.where(np.isnan(time_us), 0.0, time_us), -_MOST_US, _MOST_US).astype(np.int64)
    return whole


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
