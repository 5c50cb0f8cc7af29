"""Reads a profiler trace with memory events as the devices of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memprof.trace.importers.allocations import Allocations, Reserved, find_lives
from memprof.trace.importers.columns import ALLOC, FREE, Blocks, Entries, whole_numbers
from memprof.trace.importers.device import DeviceHistory, Profile
from memprof.trace.importers.frames import Stack, StackTable
from memprof.trace.importers.kineto_events import KinetoTrace, MemoryEvent, ProfilerStep, parse_kineto, stacks_of
from memprof.trace.importers.phases import Phases
from memprof.trace.importers.snapshot import Progress
from memprof.trace.manifest import Backend
from memprof.trace.schema import NONE, Bools, Floats, Ints

_BACKEND = Backend(
    name="kineto-memory",
    sees=("every allocation and free that torch.profiler saw with profile_memory=True",),
    blind_spots=(
        "which operators read a tensor: rows are allocations, named after the operator around them",
        "the purpose of memory, except where phases show it: most of it is in the category unknown",
        "memory that torch's allocator does not own",
    ),
)
#: Where the trace has no count of the allocator's own, or none that can be used, as on the CPU.
_UNKNOWN_START = (
    "what was in use before the profiler began, and is not freed in the trace, is not in it: the peak is a lower bound"
)


def read_kineto(path: Path, data: bytes, on_progress: Progress = lambda what, share: None) -> list[Profile]:
    """Reads a profiler trace.

    Returns:
        Its devices by number. The CPU is included only if there is no other device: its memory is not the limit.

    Raises:
        BadInputError: It is not a profiler trace, or has no memory events.
    """
    on_progress("parsing", 0.0)
    trace = parse_kineto(path, data)
    names = sorted({(event.number, event.device) for event in trace.memory if event.device != "cpu"})
    chosen = names or [(0, "cpu")]
    devices = []
    for place, (number, name) in enumerate(chosen):
        on_progress("sorting", place / len(chosen))
        devices.append(_device(trace, number, name, has_cpu=bool(names)))
    return devices


def _device(trace: KinetoTrace, number: int, name: str, *, has_cpu: bool) -> Profile:
    events = [event for event in trace.memory if event.device == name and event.size]
    stacks = StackTable()
    has_addresses = all(event.address for event in events)
    size = whole_numbers([event.size for event in events], "the sizes of [memory] events")
    stack_of = stacks_of(trace, events, stacks)
    entries = Entries.plain(
        np.where(size > 0, ALLOC, FREE),
        np.array([event.address for event in events], dtype=np.int64) if has_addresses else _paired(size),
        np.abs(size),
        np.array([event.time_us for event in events]) + trace.base_us,
        stack_of,
    )
    is_counted = all(event.allocated is not None for event in events)
    lives = find_lives(entries, Blocks.of_sizes(size[:0]), rounding=1)
    rest, drift = _rest_from_before(events, size, lives) if events and is_counted else (0, 0)
    blocks = Blocks.of_sizes(np.array([rest] if rest > 0 else [], dtype=np.int64))
    notes = [
        f"imported from a profiler's trace: {len(events):,} memory events of {name}; the peak is that of the window."
    ]
    if not has_addresses:
        notes.append("the trace contains no addresses: each free is matched with the latest allocation of its size.")
    if rest > 0:
        notes.append(f"{rest:,} bytes were in use before the trace began and stay so; their origin is unknown.")
    if drift:
        notes.append(f"at {drift:,} events the allocator's own count differs from the sum of events.")
    if has_cpu and any(event.device == "cpu" for event in trace.memory):
        notes.append("memory events of the CPU are left out.")
    steps = [ProfilerStep(one.number, one.start_us + trace.base_us, one.end_us + trace.base_us) for one in trace.steps]
    return Profile(
        DeviceHistory.profiled(
            number, name, entries, blocks, stacks, _reserved(events), knows_start=is_counted, remarks=tuple(notes)
        ),
        _BACKEND,
        "" if is_counted else _UNKNOWN_START,
        partial(_find_phases, steps=steps),
        has_addresses,
        trace.device_names.get(number, "") if name != "cpu" else "",
    )


def _paired(size: Ints) -> Ints:
    """Invents addresses for a trace without them: a free ends the latest allocation of its size."""
    open_ones: dict[int, list[int]] = {}
    address = np.arange(1, len(size) + 1, dtype=np.int64)
    for place, change in enumerate(size.tolist()):
        if change > 0:
            open_ones.setdefault(change, []).append(place + 1)
        elif open_ones.get(-change):
            address[place] = open_ones[-change].pop()
    return address


def _rest_from_before(events: Sequence[MemoryEvent], size: Ints, lives: Allocations) -> tuple[int, int]:
    """Returns the bytes in use before the trace and not freed in it, and how many counts differ from the sum."""
    counted = np.array([event.allocated for event in events], dtype=np.int64)
    start = int(counted[0] - size[0])
    drift = int(np.count_nonzero(counted != start + np.cumsum(size)))
    return start - int(lives.requested[lives.alloc == NONE].sum()), drift


def _reserved(events: Sequence[MemoryEvent]) -> Reserved:
    """Returns the allocator's own count of reserved bytes; below 0 where it has none."""
    counts = [event.reserved for event in events]
    if not any(counts) or any(count is None for count in counts):
        return Reserved.unknown(len(events))
    after = np.array(counts, dtype=np.int64)
    return Reserved(int(after[0]), after, int(after[-1]))


def _find_phases(stacks: Sequence[Stack], time_us: Floats, steps: Sequence[ProfilerStep]) -> Phases:
    """Derives phases from what ran around each operator, and steps from the profiler's own."""
    phase = np.array([stack.phase or "other" for stack in stacks], dtype=object)
    edges = np.searchsorted(time_us[1:], [step.start_us for step in steps]) + 1
    starts, first = np.unique(np.concatenate(([0], edges[edges < len(phase)])).astype(np.int64), return_index=True)
    # The row for the beginning belongs to the first step, unless something ran before that step.
    if len(starts) > 1 and starts[1] == 1:
        starts, first = np.concatenate(([0], starts[2:])), first[1:]
        shown = [steps[place - 1] for place in first.tolist()]
    else:
        shown = [steps[max(place - 1, 0)] for place in first.tolist()] if steps else []
    step = (np.searchsorted(starts, np.arange(len(phase)), side="right") - 1).astype(np.int64)
    _find_forward(phase, step, stacks)
    numbers = np.array([one.number if one.number is not None else NONE for one in shown], dtype=np.int64)
    is_named = len(numbers) == len(starts) and bool(np.all(np.diff(numbers) > 0)) and numbers[:1].tolist() != [NONE]
    if not is_named:
        numbers = np.arange(len(starts), dtype=np.int64)
    is_whole: Bools = np.ones(len(starts), dtype=np.bool_)
    return Phases(phase, numbers[step], starts.astype(np.int64), is_whole, "ProfilerStep annotations", numbers)


def _find_forward(phase: Any, step: Ints, stacks: Sequence[Stack]) -> None:
    """Labels torch operators that run in a step before its first backward as forward."""
    is_operator = np.array([stack.operator.startswith("aten.") for stack in stacks], dtype=np.bool_)
    for number in np.unique(step).tolist():
        rows = np.flatnonzero(step == number)
        backward = rows[phase[rows] == "backward"]
        if len(backward):
            before = rows[rows < backward[0]]
            phase[before[is_operator[before] & (phase[before] == "other")]] = "forward"
