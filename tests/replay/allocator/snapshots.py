"""Reads the real snapshots in shared data: for tests only, without any check beyond builtins."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memprof.replay.allocator.blocks import ALLOCATED, FREE, PENDING
from memprof.replay.allocator.rules import Settings
from memprof.replay.allocator.window import BlockMap, Range
from memprof.trace.schema import AllocatorEvents

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "data" / "snapshots"
STATES = {
    "active_allocated": ALLOCATED,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,
    "inactive": FREE,
}


@dataclass(frozen=True, eq=False)
class Device:
    """One device of a snapshot."""

    number: int
    events: AllocatorEvents
    end: BlockMap
    settings: Settings


class _Builtins(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a snapshot")


def snapshot_paths() -> list[Path]:
    """Returns the snapshots there are; none where the folder is absent."""
    return sorted(FOLDER.glob("*.pickle"))


def read_devices(path: Path) -> list[Device]:
    """Reads the devices of a snapshot that hold segments or events."""
    content = _Builtins(io.BytesIO(path.read_bytes())).load()
    if isinstance(content, list):
        content = {"segments": content, "device_traces": []}
    traces = content.get("device_traces", [])
    devices = sorted({segment["device"] for segment in content["segments"]} | {n for n, t in enumerate(traces) if t})
    conf = content.get("allocator_settings", {})
    settings = Settings(expandable_segments=bool(conf.get("expandable_segments", False)))
    return [
        Device(
            number,
            _events(traces[number] if number < len(traces) else [], number),
            _blocks([segment for segment in content["segments"] if segment["device"] == number]),
            settings,
        )
        for number in devices
    ]


def cut_beginning(events: AllocatorEvents, share: float) -> AllocatorEvents:
    """Returns events without a share of them at the beginning; a segment stays with what it was taken for."""
    first = int(len(events) * share)
    while 0 < first < len(events) and str(events.action[first - 1]).startswith("segment"):
        first += 1
    return events.take(slice(first, None))


def _events(entries: list[dict[str, Any]], device: int) -> AllocatorEvents:
    kept = [entry for entry in entries if entry["action"] != "snapshot"]
    return AllocatorEvents.of(
        index=range(len(kept)),
        device=[f"cuda:{device}"] * len(kept),
        action=[entry["action"] for entry in kept],
        address=[entry.get("addr", 0) for entry in kept],
        size_bytes=[entry["size"] for entry in kept],
        stream=[entry["stream"] for entry in kept],
    )


def _blocks(segments: list[dict[str, Any]]) -> BlockMap:
    owners: dict[Any, int] = {(0, 0): 0, None: 0}
    ranges, rows = [], []
    for segment in segments:
        owner = owners.setdefault(segment.get("segment_pool_id"), len(owners) - 1)
        ranges.append(
            Range(
                segment["address"],
                segment["total_size"],
                segment["stream"],
                owner,
                segment["segment_type"] == "small",
                segment.get("is_expandable", False),
            )
        )
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            rows.append((address, block["size"], block.get("requested_size", block["size"]), STATES[block["state"]]))
            address += block["size"]
    columns = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
    return BlockMap(ranges, columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])
