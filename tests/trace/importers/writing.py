"""Writes small memory snapshots by hand, as torch would have."""

from __future__ import annotations

import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

MIB = 1 << 20

#: The folder of real files, beside the project where it is there.
DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


def frame(place: str, name: str) -> dict[str, Any]:
    """A frame from ``file:line`` and a function."""
    file, _, line = place.rpartition(":")
    return {"filename": file, "line": int(line), "name": name}


#: Stacks, innermost first.
TRAIN = [frame("/job/train.py:9", "main")]
FORWARD = [
    frame("/job/model.py:3", "forward"),
    frame("/env/site-packages/torch/nn/modules/module.py:1790", "_call_impl"),
    *TRAIN,
]
BACKWARD = [
    {"filename": "??", "line": 0, "name": "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)"},
    {"filename": "??", "line": 0, "name": "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch>)"},
]
OPTIMIZER = [
    frame("/env/site-packages/torch/optim/adamw.py:130", "_init_group"),
    frame("/env/site-packages/torch/optim/adamw.py:220", "step"),
    *TRAIN,
]


def entry(action: str, address: int, size: int, frames: Any = None, **more: Any) -> dict[str, Any]:
    """An entry of a history; its frames are its own, so that a test may change them."""
    one = {"action": action, "addr": address, "size": size, "stream": 0, **more}
    return one if frames is None else {**one, "frames": deepcopy(list(frames))}


def freed(address: int, size: int, **more: Any) -> list[dict[str, Any]]:
    """The two entries of a free."""
    return [entry("free_requested", address, size, **more), entry("free_completed", address, size, **more)]


def block(size: int, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    """A block; what was asked for is its size where not told."""
    return {"size": size, "requested_size": size, "state": state, "frames": [], **more}


def segment(address: int, *blocks: dict[str, Any], device: int = 0, **more: Any) -> dict[str, Any]:
    """A segment made of contiguous blocks."""
    position, placed = address, []
    for one in blocks:
        placed.append({"address": position, **one})
        position += one["size"]
    active = [one for one in blocks if one["state"] != "inactive"]
    return {
        "device": device,
        "address": address,
        "total_size": position - address,
        "allocated_size": sum(one["size"] for one in active if one["state"] == "active_allocated"),
        "active_size": sum(one["size"] for one in active),
        "requested_size": sum(one["requested_size"] or 0 for one in active),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": placed,
        **more,
    }


def snapshot(segments: Any = (), *histories: Any, **more: Any) -> dict[str, Any]:
    """A snapshot of segments, and a history for each device."""
    return {"segments": list(segments), "device_traces": [list(history) for history in histories], **more}


def small_job() -> dict[str, Any]:
    """One step, worked out by hand; address = MiB, so that block n lies at n MiB.

    Before the window 4 MiB are in use at 0, of which 1 MiB is freed in it. The window takes 2 MiB in forward, frees 1,
    takes 3 in backward, frees the 2, and takes 1 in the optimizer that stays. One more MiB is requested as 1 MiB - 1.
    """
    time = iter(range(1000, 2000))
    history = [
        entry("alloc", 8 * MIB, 2 * MIB, FORWARD, time_us=next(time)),
        *freed(3 * MIB, MIB, time_us=next(time)),
        entry("segment_alloc", 16 * MIB, 4 * MIB, BACKWARD, time_us=next(time)),
        entry("alloc", 16 * MIB, 3 * MIB, BACKWARD, time_us=next(time)),
        *freed(8 * MIB, 2 * MIB, time_us=next(time)),
        entry("alloc", 8 * MIB, MIB - 1, OPTIMIZER, time_us=next(time)),
    ]
    return snapshot(
        [
            segment(0, block(3 * MIB), block(MIB, "inactive")),
            segment(8 * MIB, block(MIB, requested_size=MIB - 1), block(3 * MIB, "inactive")),
            segment(16 * MIB, block(3 * MIB), block(MIB, "inactive")),
        ],
        history,
    )


def write(path: Path, content: Any, protocol: int = 4) -> Path:
    """Pickles something into a file."""
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path
