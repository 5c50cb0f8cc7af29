"""Converts torch's snapshot of a device allocator to plain rows: its history, its blocks, its segments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from memprof.trace.schema import ACTIONS

_CODES = {action: code for code, action in enumerate(ACTIONS)}
#: States of blocks in use; the last two are the same state in different versions of torch.
_IN_USE = ("active_allocated", "active_pending_free", "active_awaiting_free")
_DEFAULT_POOL = (0, 0)


def history_rows(
    entries: Iterable[dict[str, Any]], device: int, pools: dict[tuple[int, int], int]
) -> Iterator[tuple[int, ...]]:
    """Yields rows of the spool's ``history`` stream.

    Args:
        entries: The history of one device, in order.
        device: Number of the device.
        pools: Numbers of memory pools seen so far, 0 for the default one; new ones are added.
    """
    for entry in entries:
        action = _CODES.get(entry["action"])
        if action is None:
            continue  # from a newer torch
        address = entry.get("addr", entry.get("device_free", 0))
        yield (
            int(entry.get("time_us", -1)),
            device,
            action,
            address,
            entry.get("size", 0),
            entry.get("stream", 0),
            _pool_number(entry.get("pool_id"), pools),
        )


def block_rows(segments: Iterable[dict[str, Any]]) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yields the blocks in use: device index, address, bytes, bytes requested, stream, and 1 if pending on a stream.

    Args:
        segments: The segments of all devices.
    """
    for segment in segments:
        position = segment["address"]
        for block in segment["blocks"]:
            size = block["size"]
            position = block.get("address", position)
            state = block["state"]
            if state in _IN_USE:
                yield (
                    segment["device"],
                    position,
                    size,
                    block.get("requested_size", size),
                    segment["stream"],
                    int(state != _IN_USE[0]),
                )
            position += size


def segment_records(segments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the segments without their blocks, JSON-serializable."""
    return [
        {
            "device": segment["device"],
            "address": segment["address"],
            "total_size": segment["total_size"],
            "allocated_size": segment["allocated_size"],
            "active_size": segment["active_size"],
            "requested_size": segment.get("requested_size", segment["allocated_size"]),
            "stream": segment["stream"],
            "type": segment["segment_type"],
            "pool": list(segment.get("segment_pool_id", _DEFAULT_POOL)),
            "is_expandable": bool(segment.get("is_expandable", False)),
        }
        for segment in segments
    ]


def _pool_number(pool: Any, pools: dict[tuple[int, int], int]) -> int:
    if pool is None:
        return 0
    pools.setdefault(_DEFAULT_POOL, 0)
    return pools.setdefault(tuple(pool), len(pools))
