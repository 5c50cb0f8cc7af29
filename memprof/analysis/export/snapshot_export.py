"""Exports a recording as a memory snapshot: its requests, at addresses assigned by the caching allocator's model."""

from __future__ import annotations

from typing import Any

import numpy as np

from memprof.analysis.export.recorded_snapshot import recorded_snapshot
from memprof.errors import BadInputError
from memprof.policies.allocator.policy import parse_options
from memprof.replay.allocator.blocks import ALLOCATED, FREE, UNMAPPED, Block
from memprof.replay.allocator.events import ALLOCATE, Replay, replay
from memprof.replay.allocator.rules import settings_from_options
from memprof.replay.allocator.steps import StepRequests, requests_of_recording
from memprof.trace.exporters.snapshot import ACTIVE, INACTIVE, PENDING, Blocks, DeviceSnapshot, snapshot_bytes
from memprof.trace.schema import (
    NONE,
    AllocatorEvents,
    Annotations,
    Ints,
    Modules,
    Ops,
    Segments,
    Stacks,
    Storages,
    Texts,
)
from memprof.trace.store import Trace


def export_snapshot(trace: Trace) -> bytes:
    """Writes a rank's recording in torch's memory snapshot format.

    An imported snapshot keeps its events, addresses and segments. Of other recordings, all requests are replayed in
    order through the model of the caching allocator, with the options in force: addresses and segments are the
    model's, not the device's.

    Args:
        trace: The recording.

    Raises:
        BadInputError: It contains no memory events, or is damaged.
    """
    recorded = recorded_snapshot(trace)
    if recorded is not None:
        return snapshot_bytes([recorded], trace.table(Stacks), trace.manifest.machine.allocator_settings)
    storages, ops = trace.table(Storages), trace.table(Ops)
    issued = requests_of_recording(storages, ops)
    if not len(issued.requests):
        raise BadInputError(f"{trace.path} contains no memory events to export as a snapshot.")
    options = trace.manifest.machine.allocator_settings if issued.device != "cpu" else ""
    try:
        settings = settings_from_options(parse_options(options))
    except ValueError:
        raise BadInputError(f"{trace.path} has allocator options that torch does not accept: {options}.") from None
    done = replay(issued.requests, settings)
    stack_of = np.where(issued.made_by == NONE, NONE, ops.stack_id[issued.made_by])
    words = _words(issued, storages, ops, trace.table(Modules))
    events, notes = _events(issued, done, ops, stack_of, words)
    segments, blocks = _end(done, stack_of, issued.device)
    number = int(issued.device.rpartition(":")[2]) if ":" in issued.device else 0
    device = DeviceSnapshot(number, events, notes, segments, blocks, Annotations.empty())
    return snapshot_bytes([device], trace.table(Stacks), options)


def _events(
    issued: StepRequests, done: Replay, ops: Ops, stack_of: Ints, words: Texts
) -> tuple[AllocatorEvents, list[str]]:
    """Writes the history: segments when they are reserved, and two events per free, as torch does."""
    kind, allocation = issued.requests.kind, issued.requests.allocation
    is_made = done.address[allocation] != NONE
    # A free is two rows; a segment's row precedes the request that needed it.
    own = np.repeat(np.flatnonzero(is_made), np.where(kind[is_made] == ALLOCATE, 1, 2))
    is_second = np.zeros(len(own), dtype=np.bool_)
    is_second[1:] = own[1:] == own[:-1]
    action = np.where(kind[own] == ALLOCATE, "alloc", np.where(is_second, "free_completed", "free_requested"))
    log = done.segment_events()
    at = np.array([one.event for one in log], dtype=np.int64)
    event = np.concatenate([own, at])
    order = np.lexsort((np.concatenate([1 + is_second, np.zeros(len(at))]), event))
    event = event[order]
    about = allocation[event]
    time_us = ops.start_us[np.maximum(issued.op_id[event], 0)] if len(ops) else np.zeros(len(event))
    actions: Texts = np.concatenate([action.astype(object), np.array([one.action for one in log], dtype=object)])[order]
    is_log = order >= len(own)
    table = AllocatorEvents.of(
        index=np.arange(len(event)),
        time_us=time_us,
        device=np.full(len(event), issued.device, dtype=object),
        action=actions,
        address=np.concatenate([done.address[allocation[own]], [one.address for one in log]])[order],
        size_bytes=np.concatenate([issued.requests.size[allocation[own]], [one.size for one in log]])[order],
        stream=issued.requests.stream[about],
        op_id=issued.op_id[event],
        stack_id=stack_of[about],
    )
    return table, ["" if hidden else str(text) for hidden, text in zip(is_log, words[about], strict=True)]


def _end(done: Replay, stack_of: Ints, device: str) -> tuple[Segments, Blocks]:
    """Writes the segments and blocks after the last event; of expandable segments, the mapped part."""
    names = {ALLOCATED: ACTIVE, FREE: INACTIVE}
    rows: list[dict[str, Any]] = []
    blocks: list[tuple[int, Block]] = []
    for segment in sorted(done.allocator.segments.values(), key=lambda one: one.address):
        held = [block for block in segment.blocks() if block.state != UNMAPPED]
        used = [block for block in held if block.state != FREE]
        allocated = sum(block.size for block in used if block.state == ALLOCATED)
        blocks += [(len(rows), block) for block in held]
        rows.append(
            {
                "device": device,
                "address": segment.address,
                "total_size_bytes": sum(block.size for block in held),
                "allocated_size_bytes": allocated,
                "active_size_bytes": sum(block.size for block in used),
                "requested_size_bytes": sum(block.requested for block in used),
                "stream": segment.pool.stream,
                "segment_type": "small" if segment.pool.is_small else "large",
                "is_expandable": segment.is_expandable,
            }
        )
    table = Segments.of(**{name: [row[name] for row in rows] for name in rows[0]}) if rows else Segments.empty()
    return table, Blocks(
        segment=np.array([row for row, _ in blocks], dtype=np.int64),
        address=np.array([block.address for _, block in blocks], dtype=np.int64),
        size=np.array([block.size for _, block in blocks], dtype=np.int64),
        requested=np.array([block.requested for _, block in blocks], dtype=np.int64),
        state=np.array([names.get(block.state, PENDING) for _, block in blocks], dtype=object),
        stack_id=np.array(
            [NONE if block.state == FREE else stack_of[block.allocation] for _, block in blocks], dtype=np.int64
        ),
    )


def _words(issued: StepRequests, storages: Storages, ops: Ops, modules: Modules) -> Texts:
    """Describes each allocation: category, name or operator, and module."""
    texts: Texts = np.empty(len(issued.storage_id), dtype=object)
    for place, (storage, op) in enumerate(zip(issued.storage_id.tolist(), issued.made_by.tolist(), strict=True)):
        module = int(ops.module_id[op]) if storage == NONE else int(storages.module_id[storage])
        parts = (
            "workspace" if storage == NONE else str(storages.category[storage]),
            (str(storages.name[storage]) if storage != NONE else "") or (str(ops.name[op]) if op != NONE else ""),
            f"in {modules.name[module]}" if module != NONE and modules.name[module] else "",
        )
        texts[place] = " ".join(part for part in parts if part)
    return texts
