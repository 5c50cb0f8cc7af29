"""The allocations of a device in their order, from a memory snapshot or a recording."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memprof.errors import BadInputError, UsageError
from memprof.replay.allocator.events import ALLOCATE
from memprof.replay.allocator.recorded_requests import requests_of_trace
from memprof.replay.allocator.rules import ROUNDING_BYTES
from memprof.trace.importers.columns import ALLOC, FREE, FREE_COMPLETED, FREE_REQUESTED
from memprof.trace.importers.device import DeviceHistory
from memprof.trace.importers.snapshot import read_snapshot
from memprof.trace.operator_facts import short_name
from memprof.trace.schema import NONE, Bools, Ints, Memory, Ops, Segments, Stacks
from memprof.trace.store import Trace


@dataclass(frozen=True, eq=False)
class AllocationSequence:
    """The allocations of one device between the beginning and the end of its history.

    Bytes are requested bytes, rounded up to 512: what a block has where its rest can be split off, on both sides.

    Attributes:
        source: The file.
        sizes: Bytes of each allocation, shape ``(allocations,)``.
        operators: Operator that made each, such as ``mm``; "" where unknown.
        places: File and line of each, such as ``train.py:12``; "" where unknown.
        is_backward: Whether each was made in backward, shape ``(allocations,)``.
        live: Live bytes just after each, shape ``(allocations,)``.
        start_bytes: Live bytes at the beginning.
        end_bytes: Live bytes at the end.
        start_reserved_bytes: Reserved bytes at the beginning.
        end_reserved_bytes: Reserved bytes at the end.
        peak_reserved_bytes: Peak of reserved bytes.
        segments: Segments at the end.
        torch: Versions of torch that wrote it, such as ``2.5 or 2.6``; "" if unknown.
        is_window: The file holds a part of the job chosen by memprof, not by the job.
    """

    source: str
    sizes: Ints
    operators: list[str]
    places: list[str]
    is_backward: Bools
    live: Ints
    start_bytes: int
    end_bytes: int
    start_reserved_bytes: int
    end_reserved_bytes: int
    peak_reserved_bytes: int
    segments: int
    torch: str
    is_window: bool

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def peak_bytes(self) -> int:
        """Peak of the live bytes."""
        return max(self.start_bytes, int(self.live.max(initial=0)))

    @property
    def peak_at(self) -> int:
        """Index of the allocation at the peak; -1 if that is the beginning."""
        return int(self.live.argmax()) if len(self) and self.peak_bytes > self.start_bytes else -1


def read_sequence(path: str, device: int | None = None) -> AllocationSequence:
    """Reads the allocations of a device from a memory snapshot or a recording.

    Args:
        path: The file.
        device: Number of the device; None for the one with the longest history.

    Raises:
        BadInputError: The file is neither, is damaged, or has no history.
        UsageError: It has no such device.
    """
    if is_recording_file(Path(path)):
        return sequence_of_recording(Trace.open(path))
    snapshot = read_snapshot(Path(path))
    histories = {one.number: one for one in snapshot.devices if one.facts.has_timeline}
    if not histories:
        raise BadInputError(
            f"{path} has no history of allocations: call torch.cuda.memory._record_memory_history() before the part of "
            "the job to compare, and _dump_snapshot() after it."
        )
    if device is None:
        device = max(histories, key=lambda number: len(histories[number].entries))
    if device not in histories:
        raise UsageError(f"{path} has no history of device {device}, only of {', '.join(map(str, histories))}.")
    return _of_history(path, histories[device], snapshot.torch_version)


def is_recording_file(path: Path) -> bool:
    """Returns whether a file is a zip archive, as recordings are.

    Raises:
        BadInputError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError as error:
        raise BadInputError(f"{path} cannot be read ({error.strerror or error}).") from None


def _of_history(path: str, history: DeviceHistory, torch: str) -> AllocationSequence:
    entries, blocks = history.entries, history.blocks
    rows = np.flatnonzero(entries.action == ALLOC)
    frees = next((code for code in (FREE_COMPLETED, FREE_REQUESTED, FREE) if (entries.action == code).any()), FREE)
    change = np.where(entries.action == ALLOC, 1, np.where(entries.action == frees, -1, 0)) * _rounded(entries.size)
    end = int(_rounded(blocks.requested[~blocks.is_pending]).sum())
    start = end - int(change.sum())
    stacks = [entries.stacks[row] for row in rows.tolist()]
    return AllocationSequence(
        source=path,
        sizes=_rounded(entries.size[rows]),
        operators=[stack.operator.removeprefix("aten.") for stack in stacks],
        places=[_short(stack.place) for stack in stacks],
        is_backward=np.array([stack.phase == "backward" for stack in stacks], dtype=np.bool_),
        live=start + np.cumsum(change)[rows],
        start_bytes=start,
        end_bytes=end,
        start_reserved_bytes=history.reserved.start,
        end_reserved_bytes=history.reserved.end,
        peak_reserved_bytes=history.reserved.peak,
        segments=len(history.segments),
        torch=torch,
        is_window=False,
    )


def sequence_of_recording(trace: Trace) -> AllocationSequence:
    """Returns the allocations of an open recording.

    Raises:
        BadInputError: It contains none.
    """
    ops = trace.table(Ops)
    issued = requests_of_trace(trace)
    made = issued.made_by != NONE
    if not made.any():
        raise BadInputError(f"{trace.path} contains no allocations to compare.")
    size = _rounded(issued.requests.size)
    is_new = (issued.requests.kind == ALLOCATE) & made[issued.requests.allocation]
    change = np.where(issued.requests.kind == ALLOCATE, 1, -1) * size[issued.requests.allocation]
    live = np.cumsum(change)
    born = issued.requests.allocation[is_new]
    made_by = issued.made_by[born]
    stacks = trace.table(Stacks)
    frames = dict(zip(stacks.stack_id.tolist(), stacks.frames.tolist(), strict=True))
    memory, segments = trace.table(Memory), trace.table(Segments)
    reserved = memory.reserved_bytes[(memory.device == issued.device) & (memory.reserved_bytes != NONE)]
    return AllocationSequence(
        source=str(trace.path),
        sizes=size[born],
        operators=[short_name(str(name)).replace(".", "_") for name in ops.name[made_by].tolist()],
        places=[_short(_own(frames.get(stack, ""))) for stack in ops.stack_id[made_by].tolist()],
        is_backward=np.asarray(ops.phase[made_by] == "backward", dtype=np.bool_),
        live=live[is_new],
        start_bytes=int(size[~made].sum()),
        end_bytes=int(live[-1]),
        start_reserved_bytes=int(reserved[0]) if len(reserved) else NONE,
        end_reserved_bytes=int(reserved[-1]) if len(reserved) else NONE,
        peak_reserved_bytes=int(reserved.max(initial=NONE)),
        segments=int((segments.device == issued.device).sum()),
        torch=trace.manifest.torch_version,
        is_window=True,
    )


def _rounded(size: Ints) -> Ints:
    return np.maximum(-(-size // ROUNDING_BYTES), 1) * ROUNDING_BYTES


def _own(frames: str) -> str:
    """Returns the innermost frame outside installed packages, or else the innermost one."""
    lines = frames.splitlines()
    return next((line for line in lines if "site-packages" not in line), lines[0] if lines else "")


def _short(place: str) -> str:
    """Returns ``train.py:12`` of a frame such as ``/home/me/train.py:12:main``."""
    file, _, rest = place.replace("\\", "/").rpartition("/")[2].partition(":")
    line = rest.partition(":")[0]
    return f"{file}:{line}" if line else file
