"""Snapshots as Python objects: what an export holds, and the same built row by row, as the expectation of its tests."""

from __future__ import annotations

import io
from typing import Any

from memprof.analysis.export.snapshot_export import export_snapshot
from memprof.replay.allocator.blocks import ALLOCATED, FREE, PENDING, UNMAPPED
from memprof.replay.allocator.events import ALLOCATE, FREE_COMPLETED, FREE_REQUESTED, Replay, replay
from memprof.replay.allocator.recorded_requests import requests_of_trace
from memprof.replay.allocator.rules import Settings
from memprof.replay.allocator.steps import StepRequests
from memprof.trace.schema import NONE, Modules, Ops, Saved, Stacks, Storages
from memprof.trace.store import Trace

_STATES = {ALLOCATED: "active_allocated", PENDING: "active_pending_free", FREE: "inactive"}


def exported(trace: Trace) -> bytes:
    """Returns the exported snapshot."""
    file = io.BytesIO()
    export_snapshot(trace, file)
    return file.getvalue()


def plain_snapshot(trace: Trace) -> dict[str, Any]:
    """Builds the snapshot of a recording with torch's default settings, one dictionary after the other."""
    issued = requests_of_trace(trace)
    done = replay(issued.requests, Settings())
    frames = [_frames(text) for text in trace.table(Stacks).frames.tolist()]
    return {
        "segments": _segments(trace, issued, done, frames),
        "device_traces": [_history(trace, issued, done, frames)],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        "external_annotations": [],
    }


def _history(trace: Trace, issued: StepRequests, done: Replay, frames: list[Any]) -> list[dict[str, Any]]:
    ops = trace.table(Ops)
    log = list(done.segment_events)
    entries = []
    for event, (kind, allocation) in enumerate(
        zip(issued.requests.kind.tolist(), issued.requests.allocation.tolist(), strict=True)
    ):
        about: dict[str, Any] = {
            "stream": int(issued.requests.stream[allocation]),
            "time_us": int(ops.start_us[max(issued.op_id[event], 0)]),
            "compile_context": "N/A",
            "pool_id": (0, 0),
            "frames": _made_at(ops, issued, allocation, frames),
        }
        while log and log[0].event == event:
            one = log.pop(0)
            entries.append({"action": one.action, "addr": one.address, "size": one.size, "user_metadata": "", **about})
        if kind == ALLOCATE:
            actions = ("alloc",)
        else:
            assert kind not in (FREE_REQUESTED, FREE_COMPLETED)
            actions = ("free_requested", "free_completed")
        note = _note(trace, issued, allocation)
        size, address = int(issued.requests.size[allocation]), int(done.address[allocation])
        entries += [
            {"action": action, "addr": address, "size": size, "user_metadata": note, **about} for action in actions
        ]
    return entries


def _segments(trace: Trace, issued: StepRequests, done: Replay, frames: list[Any]) -> list[dict[str, Any]]:
    segments = []
    for segment in sorted(done.allocator.segments.values(), key=lambda one: one.address):
        blocks = [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": _STATES[block.state],
                "frames": [] if block.state == FREE else _made_at(trace.table(Ops), issued, block.allocation, frames),
            }
            for block in segment.blocks()
            if block.state != UNMAPPED
        ]
        used = [block for block in blocks if block["state"] != "inactive"]
        segments.append(
            {
                "device": 0,
                "address": segment.address,
                "total_size": segment.size,
                "allocated_size": sum(block["size"] for block in used),
                "active_size": sum(block["size"] for block in used),
                "requested_size": sum(block["requested_size"] for block in used),
                "stream": segment.pool.stream,
                "segment_type": "small" if segment.pool.is_small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": blocks,
            }
        )
    return segments


def _note(trace: Trace, issued: StepRequests, allocation: int) -> dict[str, str]:
    ops, storages, modules = trace.table(Ops), trace.table(Storages), trace.table(Modules)
    storage, op = int(issued.storage_id[allocation]), int(issued.made_by[allocation])
    is_storage, is_made = storage != NONE, op != NONE
    use, module = (
        (storages.category[storage], storages.module_id[storage]) if is_storage else ("workspace", ops.module_id[op])
    )
    note = {
        "category": use,
        "name": storages.name[storage] if is_storage else "",
        "operator": ops.name[op] if is_made else "",
        "module": "" if module == NONE else f"{modules.name[module]} ({modules.type[module]})".strip(),
        "phase": ops.phase[op] if is_made else "",
    }
    saved = trace.table(Saved)
    own = saved.take(saved.storage_id == storage)
    if len(own) and is_storage and use not in ("parameter", "buffer"):
        first = int(own.forward_op_id.argmin())
        place, saver = own.module_id[first], str(ops.name[own.forward_op_id[first]])
        note["saved for backward by"] = saver if place == NONE else f"{saver} in {modules.name[place] or 'the model'}"
    return {key: text for key, text in note.items() if text}


def _made_at(ops: Ops, issued: StepRequests, allocation: int, frames: list[Any]) -> list[dict[str, Any]]:
    made_by = int(issued.made_by[allocation])
    stack = NONE if made_by == NONE else int(ops.stack_id[made_by])
    found: list[dict[str, Any]] = [] if stack == NONE else frames[stack]
    return found


def _frames(text: str) -> list[dict[str, Any]]:
    frames = []
    for line in text.splitlines():
        file, number, name = line.rsplit(":", 2)
        frames.append({"filename": file, "line": int(number), "name": name})
    return frames
