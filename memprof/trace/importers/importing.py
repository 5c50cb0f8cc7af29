"""Imports another tool's file as the ranks of a trace, with a manifest that names its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from memprof.errors import BadInputError, UsageError
from memprof.trace.importers.allocations import BlockSizes
from memprof.trace.importers.device import HOST, HOST_NAME, PROFILED_START, DeviceFacts, DeviceHistory
from memprof.trace.importers.kineto import read_kineto
from memprof.trace.importers.memory_timeline import read_timeline
from memprof.trace.importers.phases import Phases, find_phases
from memprof.trace.importers.snapshot import Progress, Snapshot, read_snapshot, without_collector
from memprof.trace.importers.snapshot_tables import device_tables
from memprof.trace.importers.sniff import SNAPSHOT, TIMELINE, read_input
from memprof.trace.manifest import PINNED, Backend, Capture, Machine, Manifest, Window
from memprof.trace.schema import NONE, AllocatorEvents, Table
from memprof.units import format_bytes
from memprof.version import __version__

_BACKEND = Backend(
    name="cuda-snapshot",
    sees=(
        "every allocation and free of torch's CUDA allocator in the recorded window, and all that is in use at its end",
    ),
    blind_spots=(
        "which operators read a tensor: rows are allocations, and their modules those in their stacks",
        "how long operators run",
        "the purpose of memory: categories follow from stacks, phases and sizes",
        "memory that torch's CUDA allocator does not own (NCCL, cuBLAS handles, the CUDA context)",
    ),
)
_HOST_BACKEND = replace(
    _BACKEND,
    sees=("every allocation and free of the host's pinned memory in the recorded window, and all in use at its end",),
    blind_spots=(
        "which operators copy to or from a block, and how long that takes",
        "the purpose of a block",
        "pageable memory of the host, and memory pinned without torch's allocator",
    ),
)
HOW_TO_RECORD = (
    "call torch.cuda.memory._record_memory_history() before the job allocates, and "
    "torch.cuda.memory._dump_snapshot('snapshot.pickle') after a few steps"
)


#: How many lines of pinned memory are named in a clause.
_LINES = 3


@dataclass(frozen=True, eq=False)
class Imported:
    """The result of an import.

    Attributes:
        kind: ``snapshot``, ``kineto`` or ``timeline``.
        ranks: Manifest and tables of each rank, as ``write_trace`` takes them.
        devices: Summary figures of each device, as JSON containers.
        remarks: Sentences for the user.
    """

    kind: str
    ranks: list[tuple[Manifest, dict[type[Table], Table]]]
    devices: list[dict[str, Any]]
    remarks: tuple[str, ...]


def import_file(
    path: str | Path,
    device: int | None = None,
    rank: int | None = None,
    on_progress: Progress = lambda what, share: None,
    block_sizes: BlockSizes | None = None,
) -> Imported:
    """Imports a memory snapshot, a profiler trace, or a memory timeline.

    Args:
        path: The file; its format is detected from its content.
        device: The only device to import, HOST for pinned memory of the host; where left out, all devices with data,
            and the host only where there is none.
        rank: The rank for a file of one device; the device's number where left out.
        on_progress: Called with the current activity and the share completed.
        block_sizes: Determines the block sizes of a snapshot; without it, requests are rounded as the allocator does,
            which is too little for blocks that it does not split.

    Raises:
        BadInputError: The file is missing, empty, damaged, foreign, or has invalid content.
        UsageError: It has no such device, or several devices for a single rank.
    """
    path = Path(path)
    kind, data = read_input(path)
    if kind == SNAPSHOT:
        with without_collector():
            snapshot = read_snapshot(path, data, on_progress, block_sizes)
            del data
            return import_snapshot(path, snapshot, device, rank, on_progress)
    found = [read_timeline(path, data)] if kind == TIMELINE else read_kineto(path, data, on_progress)
    histories = [one.history for one in found]
    numbers = [one.number for one in histories]
    if len(set(numbers)) < len(found):
        raise BadInputError(f"{path} has memory of several kinds of devices with one number; export one of them.")
    chosen = _choose(path, numbers, device, rank)
    ranks = []
    for one, history in zip(found, histories, strict=True):
        if history.number in chosen:
            tables, phases = device_tables(history, one.find_phases)
            if not one.has_addresses:
                del tables[AllocatorEvents]
            machine = Machine(device_name=one.device_name, device_kind=history.name.partition(":")[0])
            manifest = Manifest(
                backend=one.backend,
                capture=Capture(is_complete=not one.reason, reason=one.reason),
                notes=history.remarks,
                **_common(path, history, phases, machine, rank, len(chosen)),
            )
            ranks.append((manifest, tables))
    facts = [one.facts.to_json() for one in histories if one.number in chosen]
    return Imported(kind=kind, ranks=ranks, devices=facts, remarks=())


def _common(
    path: Path, history: DeviceHistory, phases: Phases, machine: Machine, rank: int | None, world_size: int
) -> dict[str, Any]:
    """Returns what a manifest says of any file; ranks are numbered as devices where no rank is given."""
    times = history.entries.time_us[~np.isnan(history.entries.time_us)]
    return {
        "memprof_version": __version__,
        "created_us": float(times.min()) if len(times) else 0.0,
        "target": path.name,
        "machine": machine,
        "rank": max(history.number, 0) if rank is None else rank,
        "world_size": world_size,
        "window": Window(steps=len(phases.starts)),
    }


def import_snapshot(
    path: Path,
    snapshot: Snapshot,
    device: int | None = None,
    rank: int | None = None,
    on_progress: Progress = lambda what, share: None,
) -> Imported:
    """Imports a snapshot that was read; otherwise as ``import_file``."""
    every = (*snapshot.devices, *([snapshot.host] if snapshot.host else ()))
    if not every:
        raise BadInputError(
            f"{path} is a snapshot of an allocator that held nothing and recorded nothing. To record something, "
            f"{HOW_TO_RECORD}."
        )
    chosen = _choose(path, [one.number for one in every], device, rank)
    ranks, remarks = [], []
    for place, one in enumerate(every):
        if one.number not in chosen:
            continue
        on_progress("building", place / len(every))
        tables, phases = device_tables(one, partial(find_phases, annotations=one.annotations))
        manifest = _manifest(path, snapshot, one, phases, rank)
        ranks.append((manifest, tables))
        name = "the host" if one.number == HOST else f"device {one.number}"
        if not one.facts.has_timeline:
            remarks.append(
                f"{name} has no timeline (entries in its history: {one.facts.entries}); its end state is "
                f"shown. To record one, {HOW_TO_RECORD}."
            )
        if one.facts.missing_actions:
            remarks.append(f"{name}: {_missing_reason(one.facts)}.")
        if one.facts.out_of_memory:
            remarks.append(f"{name} ran {manifest.capture.reason}.")
    if device is None and snapshot.host and HOST not in chosen:
        remarks.append(f"{_pinned(snapshot.host)}; --only {HOST_NAME} imports it as a recording.")
    return Imported(
        kind=SNAPSHOT,
        ranks=ranks,
        devices=[one.facts.to_json() for one in every if device is None or one.number in chosen],
        remarks=tuple(remarks),
    )


def _choose(path: Path, numbers: Sequence[int], device: int | None, rank: int | None) -> list[int]:
    names = {number: HOST_NAME if number == HOST else str(number) for number in numbers}
    if device is not None and device not in names:
        wanted = "the host" if device == HOST else f"device {device}"
        raise UsageError(f"{path} holds nothing of {wanted}; it has {', '.join(names.values())}.")
    chosen = [number for number in numbers if number != HOST] or list(numbers) if device is None else [device]
    if rank is not None and len(chosen) > 1:
        raise UsageError(
            f"{path} holds devices {', '.join(map(str, chosen))}, which cannot all be rank {rank}: choose one with "
            "--only."
        )
    return chosen


def _pinned(host: DeviceHistory) -> str:
    """Describes pinned memory in a clause: its peak, and the lines that pinned most of what is in use at the end."""
    facts, held = host.facts, Counter[str]()
    for stack, size in zip(host.blocks.stacks, host.blocks.size.tolist(), strict=True):
        held[stack.place or "(no stack)"] += size
    lines = ", ".join(f"{line} {format_bytes(size)}" for line, size in held.most_common(_LINES))
    return (
        f"{PINNED}: peak {format_bytes(facts.peak_allocated_bytes)} in use for "
        f"{format_bytes(facts.peak_requested_bytes)} requested, {format_bytes(facts.peak_reserved_bytes)} reserved"
        f"{f'; at the end {lines}' if lines else ''}"
    )


def _manifest(path: Path, snapshot: Snapshot, device: DeviceHistory, phases: Phases, rank: int | None) -> Manifest:
    is_host = device.number == HOST
    notes = _notes(device, phases)
    if snapshot.host is not None and not is_host:
        notes.append(f"{_pinned(snapshot.host)} (memprof import --only {HOST_NAME}).")
    machine = Machine(
        device_name=PINNED if is_host else "" if device.name == "cpu" else f"CUDA device {device.number}",
        device_kind=device.name.partition(":")[0],
        allocator_settings=snapshot.settings,
    )
    return Manifest(
        torch_version=snapshot.torch_version,
        backend=_HOST_BACKEND if is_host else _BACKEND,
        capture=_capture(device.facts),
        notes=tuple(notes),
        **_common(path, device, phases, machine, rank, 1 if is_host else len(snapshot.devices)),
    )


def _missing_reason(facts: DeviceFacts) -> str:
    """Returns what the history leaves out, as a clause; "" where nothing that matters is missing."""
    if not facts.missing_actions:
        return ""
    return (
        f"the history leaves out {' and '.join(facts.missing_actions)} (skip_actions), so figures before its end are "
        "not reliable"
    )


def _capture(facts: DeviceFacts) -> Capture:
    if not facts.out_of_memory:
        reason = PROFILED_START if facts.start_allocated_bytes == NONE else _missing_reason(facts)
        return Capture(is_complete=not reason, reason=reason)
    last = facts.out_of_memory[-1]
    who = last.source or "code without a stack"
    return Capture(
        is_complete=False,
        reason=(
            f"out of memory: {who} requested {format_bytes(last.requested_bytes)} while "
            f"{format_bytes(last.free_bytes)} of the device were free"
        ),
    )


def _notes(device: DeviceHistory, phases: Phases) -> list[str]:
    facts, entries = device.facts, device.entries
    counted = ", ".join(f"{count:,} {name}" for name, count in facts.actions.items())
    notes = []
    if facts.has_timeline:
        notes.append(
            f"imported from a memory snapshot of {facts.entries:,} entries ({counted}); in the recorded window, "
            f"allocated bytes peak at {_count(facts.peak_allocated_bytes)}, requested ones at "
            f"{_count(facts.peak_requested_bytes)}, reserved ones at {_count(facts.peak_reserved_bytes)}."
        )
        notes.append(
            "the history is complete: recording began before the first allocation."
            if facts.history_complete
            else f"{_missing_reason(facts)}."
            if facts.missing_actions
            else f"recording began with {_count(facts.start_requested_bytes)} requested bytes in use already and "
            f"{_count(facts.start_reserved_bytes)} reserved; the peak is that of the recorded window."
        )
    else:
        notes.append(
            f"no history was recorded (entries: {facts.entries}): only the end state is shown, with a row for each "
            f"place in the code, in no order of time. To record one, {HOW_TO_RECORD}."
        )
    notes.append(
        f"at the end {_count(facts.end_allocated_bytes)} bytes are allocated, for {_count(facts.end_requested_bytes)} "
        f"requested, in segments of {_count(facts.end_reserved_bytes)}."
    )
    if facts.has_timeline and bool(np.isnan(entries.time_us).all()):
        notes.append("the file contains no times, as before torch 2.3: the axis is the order of entries.")
    if phases.how:
        notes.append(f"steps are identified by {phases.how}; the first and the last are incomplete.")
    one_of_two = {"free_requested", "free_completed"} - facts.actions.keys()
    if facts.has_timeline and len(one_of_two) == 1 and "free" not in facts.actions:
        notes.append(
            f"the history leaves out {one_of_two.pop()} (skip_actions): memory counts as freed at the other entry, and "
            "what is pending free is not known."
        )
    notes += [f"the snapshot has {remark}" if remark[:1].isdigit() else remark for remark in device.remarks]
    if device.lives.clashes:
        notes.append(
            f"{device.lives.clashes:,} entries contradict others (memory allocated or freed twice): figures may be off."
        )
    held = int(device.segments.allocated_size_bytes.sum())
    if len(device.segments) and held != facts.end_allocated_bytes:
        notes.append(
            f"segments say that {held:,} bytes are allocated and their blocks {facts.end_allocated_bytes:,}; the sum "
            "of the blocks is used."
        )
    if facts.end_reserved_bytes - facts.peak_reserved_bytes > 0 or device.reserved.start < 0:
        notes.append("segments in the history do not add up to those at the end; reserved bytes may be off.")
    if device.number == HOST and facts.end_allocated_bytes and facts.peak_allocated_bytes == facts.peak_requested_bytes:
        notes.append(
            "the file gives the size of each pinned block only, which torch rounds up to a power of two: less may have "
            "been requested."
        )
    if entries.unknown:
        notes.append(f"actions unknown to this version were left out: {', '.join(sorted(entries.unknown))[:200]}.")
    return notes


def _count(size: int) -> str:
    return "unknown" if size == NONE else f"{size:,}"
