"""Reads a memory timeline of ``torch.profiler``: bytes by category over time, or the changes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memprof.errors import BadInputError
from memprof.trace.files.reading import parse_json
from memprof.trace.importers.columns import ALLOC, FREE, Blocks, Entries
from memprof.trace.importers.device import PROFILED_START, DeviceHistory, Profile
from memprof.trace.importers.frames import NO_STACK, StackTable
from memprof.trace.importers.phases import find_phases
from memprof.trace.manifest import Backend
from memprof.trace.schema import NONE

#: torch's categories in the order of their columns (torch/profiler/_memory_profiler.py, _CATEGORY_TO_COLORS), as here.
_CATEGORIES = (
    "parameter", "optimizer_state", "input", "temporary", "activation", "gradient", "temporary", "unknown",
)  # fmt: skip
#: Numbers of a row of the raw format: time in ns, action, change in bytes, category.
_RAW_NUMBERS = 4

_BACKEND = Backend(
    name="memory-timeline",
    sees=("bytes of one device by category over time, as torch's profiler classified them",),
    blind_spots=(
        "single tensors: what a category gains and loses is shown as one allocation each",
        "operators, modules, stacks, and reserved memory",
        "the device: the file does not name it",
    ),
)
#: CUDA's allocator rounds to this: what is smaller was allocated on the CPU.
_BLOCK_BYTES = 512
#: As many smaller blocks are not what is left where an old tensor is freed in the same microsecond.
_FEW_BLOCKS = 3


@dataclass
class _Pieces:
    """Memory of one category: what it gained, split where less of it was lost at once."""

    alive: list[tuple[int, int]] = field(default_factory=list)  # row and bytes
    done: list[tuple[int, int, int]] = field(default_factory=list)  # first row, row behind the last, bytes

    def change(self, row: int, change: int) -> None:
        if change > 0:
            self.alive.append((row, change))
            return
        left = -change
        # The latest of the same size, else the latest.
        same = next((place for place in range(len(self.alive) - 1, -1, -1) if self.alive[place][1] == left), None)
        if same is not None:
            born, size = self.alive.pop(same)
            self.done.append((born, row, size))
            return
        while left and self.alive:
            born, size = self.alive.pop()
            lost = min(size, left)
            self.done.append((born, row, lost))
            if size > lost:
                self.alive.append((born, size - lost))
            left -= lost


class _NoTimelineError(ValueError):
    """A list that is no memory timeline; the message says why."""


def read_timeline(path: Path, data: bytes) -> Profile:
    """Reads a memory timeline.

    Args:
        path: Name of the file, for errors.
        data: Its JSON: ``[times, sizes by category]``, or a list of ``[time, action, change, category]``.

    Raises:
        BadInputError: It is not a memory timeline, or holds nothing.
    """
    try:
        loaded = parse_json(data)
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON, or is cut short: {error}.") from None
    if not isinstance(loaded, list) or not all(isinstance(row, list) for row in loaded):
        raise BadInputError(f"{path} is JSON, but neither a profiler trace nor a memory timeline.")
    is_raw = not (len(loaded) == 2 and all(isinstance(row, list) for row in loaded[1]) and len(loaded[1]))
    try:
        times_us, changes = _raw(loaded) if is_raw else _by_category(loaded)
    except (TypeError, ValueError, IndexError) as error:
        why = f" ({error})" if isinstance(error, _NoTimelineError) else ""
        raise BadInputError(f"{path} is JSON, but neither a profiler trace nor a memory timeline{why}.") from None
    if not changes:
        raise BadInputError(f"{path} is a memory timeline without any memory in it.")
    pieces = [_Pieces() for _ in _CATEGORIES]
    for row, category, change in changes:
        pieces[category].change(row, change)
    name = _device_of(times_us, changes)
    what = "changes of single tensors" if is_raw else "bytes by category"
    notes = (
        f"imported from a memory timeline of torch.profiler ({what}); categories are the profiler's own.",
        "the file does not name its device, nor the version of torch"
        + (": blocks below 512 B show that it is the CPU." if name == "cpu" else "."),
    )
    find = partial(find_phases, annotations=())
    return Profile(_history(name, times_us, pieces, notes), _BACKEND, PROFILED_START, find, False, f"{name} device")


def _device_of(times_us: list[float], changes: list[tuple[int, int, int]]) -> str:
    """Returns ``cpu`` where blocks are smaller than those of CUDA's allocator, else ``unknown``.

    What is there at first may be tensors from before the window, with the sizes of their elements.
    """
    by_time: dict[float, int] = {}
    for row, _, change in changes:
        by_time[times_us[row]] = by_time.get(times_us[row], 0) + change
    by_time.pop(min(by_time))
    return "cpu" if sum(0 < change < _BLOCK_BYTES for change in by_time.values()) >= _FEW_BLOCKS else "unknown"


def _by_category(loaded: list[Any]) -> tuple[list[float], list[tuple[int, int, int]]]:
    """Reads ``[times, sizes]``; each row of sizes starts with a zero."""
    times, rows = loaded
    if len(times) != len(rows):
        raise _NoTimelineError("as many times as rows are needed")
    changes: list[tuple[int, int, int]] = []
    last = [0] * len(_CATEGORIES)
    for row, sizes in enumerate(rows):
        held = [_whole(size) for size in sizes[1 : 1 + len(_CATEGORIES)]]
        held += [0] * (len(_CATEGORIES) - len(held))
        # What is lost in a row makes room for what is gained.
        deltas = [(now - before, place) for place, (now, before) in enumerate(zip(held, last, strict=True))]
        changes += [(row, place, delta) for delta, place in sorted(deltas) if delta]
        last = held
    return [float(time) for time in times], changes


def _raw(loaded: list[Any]) -> tuple[list[float], list[tuple[int, int, int]]]:
    """Reads single changes; what existed before has the time -1."""
    known = [int(row[0]) for row in loaded if len(row) == _RAW_NUMBERS and int(row[0]) >= 0]
    first = min(known, default=0)
    times, changes = [], []
    for row, (time_ns, _, change, category) in enumerate(loaded):
        times.append(float(time_ns if time_ns >= 0 else first) / 1000)
        if not 0 <= _whole(category) < len(_CATEGORIES):
            raise _NoTimelineError(f"category {category}")
        if _whole(change):
            changes.append((row, category, change))
    return times, changes


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 2**60:
        raise _NoTimelineError("a byte count is not a whole number")
    return value


def _history(name: str, times_us: list[float], pieces: list[_Pieces], notes: tuple[str, ...]) -> DeviceHistory:
    """Writes the pieces as a history of allocations and frees, each at an address of its own."""
    rows: list[tuple[int, int, int, int, str]] = []  # row, free before alloc, address, bytes, category
    address = 0
    for category, one in zip(_CATEGORIES, pieces, strict=True):
        for born, gone, size in [*one.done, *((born, NONE, size) for born, size in one.alive)]:
            address += 1
            rows.append((born, 1, address, size, category))
            if gone != NONE:
                rows.append((gone, 0 if gone > born else 2, address, size, ""))
    rows.sort(key=lambda one: one[:3])
    count = len(rows)
    entries = Entries.plain(
        np.array([ALLOC if one[1] == 1 else FREE for one in rows], dtype=np.int64),
        np.array([one[2] for one in rows], dtype=np.int64),
        np.array([one[3] for one in rows], dtype=np.int64),
        np.array([times_us[one[0]] for one in rows]),
        [NO_STACK] * count,
        [one[4] for one in rows],
    )
    return DeviceHistory.profiled(0, name, entries, Blocks.of_sizes(entries.size[:0]), StackTable(), remarks=notes)
