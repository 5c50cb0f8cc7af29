"""Imports another tool's file as the ranks of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from memprof.errors import BadInputError, UsageError
from memprof.trace.importers.allocations import BlockSizes
from memprof.trace.importers.kineto import read_kineto
from memprof.trace.importers.memory_timeline import read_timeline
from memprof.trace.importers.phases import find_phases
from memprof.trace.importers.snapshot import Progress, Snapshot, parse_snapshot
from memprof.trace.importers.snapshot_manifest import HOW_TO_RECORD, device_manifest, missing_reason
from memprof.trace.importers.snapshot_tables import device_tables
from memprof.trace.importers.sniff import SNAPSHOT, TIMELINE, read_input
from memprof.trace.manifest import Manifest
from memprof.trace.schema import Table


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
        device: The only device to import; all devices with data where left out.
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
        snapshot = parse_snapshot(path, data, on_progress, block_sizes)
        del data
        return _import_snapshot(path, snapshot, device, rank, on_progress)
    if kind == TIMELINE:
        timeline = read_timeline(path, data)
        _choose(path, [timeline.history.number], device, rank)
        ranks = [timeline.build(path, rank or 0, 1)]
        return Imported(kind=kind, ranks=ranks, devices=[timeline.history.facts.to_json()], remarks=())
    found = read_kineto(path, data, on_progress)
    if len({one.number for one in found}) < len(found):
        raise BadInputError(f"{path} has memory of several kinds of devices with one number; export one of them.")
    chosen = _choose(path, [one.number for one in found], device, rank)
    return Imported(
        kind=kind,
        ranks=[
            one.build(path, one.number if rank is None else rank, len(chosen)) for one in found if one.number in chosen
        ],
        devices=[one.facts for one in found if one.number in chosen],
        remarks=(),
    )


def _import_snapshot(
    path: Path, snapshot: Snapshot, device: int | None, rank: int | None, on_progress: Progress
) -> Imported:
    if not snapshot.devices:
        raise BadInputError(
            f"{path} is a snapshot of an allocator that held nothing and recorded nothing. To record something, "
            f"{HOW_TO_RECORD}."
        )
    chosen = _choose(path, [one.number for one in snapshot.devices], device, rank)
    ranks, remarks = [], []
    for place, one in enumerate(snapshot.devices):
        if one.number not in chosen:
            continue
        on_progress("building", place / len(snapshot.devices))
        tables, phases = device_tables(one, partial(find_phases, annotations=one.annotations))
        manifest = device_manifest(path, snapshot, one, phases, one.number if rank is None else rank)
        ranks.append((manifest, tables))
        if not one.facts.has_timeline:
            remarks.append(
                f"device {one.number} has no timeline (entries in its history: {one.facts.entries}); its end state is "
                f"shown. To record one, {HOW_TO_RECORD}."
            )
        if one.facts.missing_actions:
            remarks.append(f"device {one.number}: {missing_reason(one.facts)}.")
        if one.facts.out_of_memory:
            remarks.append(f"device {one.number} ran {manifest.capture.reason}.")
    return Imported(
        kind=SNAPSHOT,
        ranks=ranks,
        devices=[one.facts.to_json() for one in snapshot.devices if one.number in chosen],
        remarks=tuple(remarks),
    )


def _choose(path: Path, numbers: Sequence[int], device: int | None, rank: int | None) -> list[int]:
    if device is not None and device not in numbers:
        raise UsageError(f"{path} holds nothing of device {device}; it has {', '.join(map(str, numbers))}.")
    chosen = list(numbers) if device is None else [device]
    if rank is not None and len(chosen) > 1:
        raise UsageError(
            f"{path} holds devices {', '.join(map(str, numbers))}, which cannot all be rank {rank}: choose one with "
            "--device."
        )
    return chosen
