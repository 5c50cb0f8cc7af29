"""Writes a memory snapshot like ``torch.cuda.memory._dump_snapshot()`` for torch's own ``_memory_viz`` to read."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memprof.trace.schema import NONE, AllocatorEvents, Annotations, Ints, Segments, Stacks, Texts

#: What torch itself writes.
_PROTOCOL = 4
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


@dataclass(frozen=True, eq=False)
class DeviceSnapshot:
    """Snapshot data of one device.

    Attributes:
        number: The device's number.
        events: Its history, in order.
        notes: What each event refers to, in words; "" for nothing.
        segments: Its segments at the end.
        blocks: Their blocks.
        annotations: Named time spans.
    """

    number: int
    events: AllocatorEvents
    notes: Sequence[str]
    segments: Segments
    blocks: Blocks
    annotations: Annotations


def snapshot_bytes(devices: Sequence[DeviceSnapshot], stacks: Stacks, settings: str = "") -> bytes:
    """Writes a snapshot as a pickle of dictionaries, lists, texts and numbers.

    Args:
        devices: The devices.
        stacks: The stacks that events and blocks refer to.
        settings: The value of ``PYTORCH_ALLOC_CONF``.
    """
    frames = [_frames(str(text)) for text in stacks.frames]
    traces: list[list[dict[str, Any]]] = [[] for _ in range(1 + max((one.number for one in devices), default=-1))]
    for device in devices:
        traces[device.number] = _history(device, frames)
    content = {
        "segments": [segment for device in devices for segment in _segments(device, frames)],
        "device_traces": traces,
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": settings, "expandable_segments": "True" in settings},
        "external_annotations": [one for device in devices for one in _annotations(device)],
    }
    return pickle.dumps(content, protocol=_PROTOCOL)


def _history(device: DeviceSnapshot, frames: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    events = device.events
    columns = (
        events.action.tolist(),
        events.address.tolist(),
        events.size_bytes.tolist(),
        events.stream.tolist(),
        events.time_us.tolist(),
        events.stack_id.tolist(),
        device.notes,
        events.compile_context.tolist(),
        map(_pool_id, events.pool.tolist()),
    )
    return [
        {
            "action": action,
            "device_free" if action == "oom" else "addr": address,
            "size": size,
            "stream": stream,
            "time_us": int(time_us) if time_us == time_us else 0,
            "compile_context": context or "N/A",
            "user_metadata": note,
            "pool_id": pool,
            "frames": frames[stack] if stack != NONE else [],
        }
        for action, address, size, stream, time_us, stack, note, context, pool in zip(*columns, strict=True)
    ]


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


def _segments(device: DeviceSnapshot, frames: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
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
                "frames": frames[stack] if stack != NONE else [],
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
