"""Converts a CPU recording to the form of one made on a CUDA device.

Every allocation and free goes through the model of the caching allocator, which other tests compare with real
snapshots to the byte; its actions become a device's recording: reports of blocks and totals, the allocator's history,
its segments. Meanwhile the peaks are counted as torch's own statistics count them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memprof.replay.allocator.blocks import ALLOCATED, PENDING, UNMAPPED, Block, Segment
from memprof.replay.allocator.model import CachingAllocator
from memprof.replay.allocator.rules import Settings
from memprof.trace.assemble.memory.native_events import DeviceEvents, read_device_events
from memprof.trace.assemble.steps import choose_epoch
from memprof.trace.files.spool import COLUMNS, WRITE, Spool, read_spool
from memprof.trace.files.spool_writer import SpoolWriter
from memprof.trace.schema import ACTIONS, Ints

DEVICE = "cuda:0"
_CODE = {name: code for code, name in enumerate(ACTIONS)}


@dataclass
class Statistics:
    """What torch.cuda.memory_stats() would count: each value with the moment from which it holds (nanoseconds)."""

    moments: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)

    def peaks(self, start_ns: int, end_ns: int) -> tuple[int, int, int]:
        """Returns the peaks of allocated, active and reserved bytes of a range, as after reset_peak_memory_stats."""
        first = max(bisect_right(self.moments, start_ns) - 1, 0)
        last = bisect_right(self.moments, end_ns)
        return (
            max(self.allocated[first:last]),
            max(self.active[first:last]),
            max(self.reserved[first:last]),
        )


class Twin:
    """One conversion."""

    def __init__(self, source: Path, *, settings: Settings | None = None, delay: int = 0):
        """Reads a recording.

        Args:
            source: Folder of a process's raw recording, made on the processor.
            settings: The allocator's options.
            delay: Number of allocations for which frees wait for another stream.
        """
        self.statistics = Statistics()
        self._spool = read_spool(source)
        epoch = choose_epoch(self._spool)
        assert epoch is not None
        self._memory_events: DeviceEvents = read_device_events(self._spool, epoch, "cpu")
        self._start_ns = epoch.start_ns
        self._allocator = CachingAllocator(settings)
        self._delay = delay
        self._allocated = self._pending = 0
        self._waiting: list[tuple[int, Block, int]] = []
        self._takings = 0
        self._held: dict[int, tuple[Block, int]] = {}
        self._places: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        self._rows: dict[str, list[int]] = defaultdict(list)

    def write(self, folder: Path, *, has_reports: bool = True, kernels: dict[int, int] | None = None) -> Path:
        """Writes the recording as a device's; returns the folder.

        Args:
            folder: Where to.
            has_reports: Whether the allocator reports to the profiler.
            kernels: Work on the device by row of the timed step.
        """
        for address, size in zip(
            self._memory_events.alive_address.tolist(), self._memory_events.alive_bytes.tolist(), strict=True
        ):
            block = self._take(address, size, self._start_ns)
            self._rows["device_alive"] += [self._start_ns, 0, block.address, block.size, size, 0, 0]
        self._rows["history"].clear()  # it begins now
        self._rows["device_sizes"].clear()
        for moment, address, change in zip(
            self._memory_events.time_ns.tolist(),
            self._memory_events.address.tolist(),
            self._memory_events.size_bytes.tolist(),
            strict=True,
        ):
            if change > 0:
                self._finish_waiting(moment)
                self._take(address, change, moment)
            elif address in self._held:
                self._give_back(address, moment)
        for row, device_ns in (kernels or {}).items():
            self._rows["kernels"] += [row, device_ns]
        self._write(folder, has_reports)
        return folder

    def _take(self, address: int, size: int, moment: int) -> Block:
        log_before = len(self._allocator.log)
        block = self._allocator.allocate(size)
        assert block is not None
        for one in self._allocator.log[log_before:]:
            self._history(moment, one.action, one.address, one.size)
        self._history(moment, "alloc", block.address, size)
        self._held[address] = (block, size)
        moments, addresses = self._places[address]
        moments.append(moment)
        addresses.append(block.address)
        self._allocated += block.size
        self._takings += 1
        self._report(moment, block.size)
        return block

    def _give_back(self, address: int, moment: int) -> None:
        block, size = self._held.pop(address)
        place, taken = block.address, block.size  # joined with its neighbours when it goes
        self._history(moment, "free_requested", place, size)
        self._allocated -= taken
        if self._delay and taken >= 1 << 14:
            self._allocator.request_free(block)
            self._pending += taken
            self._waiting.append((self._takings + self._delay, block, size))
        else:
            self._history(moment, "free_completed", place, size)
            self._allocator.complete_free(block)
        self._report(moment, -taken)

    def _finish_waiting(self, moment: int) -> None:
        while self._waiting and self._waiting[0][0] <= self._takings:
            _, block, size = self._waiting.pop(0)
            self._pending -= block.size
            self._history(moment, "free_completed", block.address, size)
            self._allocator.complete_free(block)

    def _history(self, moment: int, action: str, address: int, size: int) -> None:
        self._rows["history"] += [moment // 1000, 0, _CODE[action], address, size, 0, 0]

    def _report(self, moment: int, change: int) -> None:
        self._rows["device_sizes"] += [moment, 0, change]
        counted = self.statistics
        counted.moments.append(moment)
        counted.allocated.append(self._allocated)
        counted.active.append(self._allocated + self._pending)
        counted.reserved.append(self._allocator.reserved)

    def _place(self, address: Ints, moment: Ints) -> list[int]:
        found = []
        for one, when in zip(address.tolist(), moment.tolist(), strict=True):
            moments, addresses = self._places.get(one, ([], []))
            place = bisect_right(moments, when) - 1
            found.append(addresses[place] if place >= 0 else one)
        return found

    def _write(self, folder: Path, has_reports: bool) -> None:
        spool = self._spool
        rows = {name: values.copy() for name, values in spool.rows.items()}
        operators = spool.columns("operators")
        touches = rows["touches"]
        at_end = touches[:, 3] == WRITE
        moment = np.where(at_end, operators["end_ns"][touches[:, 0]], operators["start_ns"][touches[:, 0]])
        touches[:, 1] = self._place(touches[:, 1], moment)
        facts = rows["facts"]
        facts[:, 1] = self._place(facts[:, 1], facts[:, 0])
        writer = SpoolWriter(folder)
        records = {**spool.records, **self._records(spool)}
        for epoch in records["epochs"]:
            epoch["source"] = "native" if has_reports else "dispatch"
        for stream, values in records.items():
            for value in values:
                writer.write_record(stream, value)
        marks = rows["events"][(rows["events"][:, 1] == 0) & (rows["events"][:, 2] == 0)]
        kept = {**{name: array("q", values.ravel().tolist()) for name, values in rows.items()}}
        kept["events"] = array("q", marks.ravel().tolist())
        kept["alive"] = array("q")
        for stream in ("device_alive", "history", "device_sizes", "kernels"):
            kept[stream] = array("q", self._rows[stream] if stream != "device_sizes" or has_reports else [])
        for stream in COLUMNS:
            writer.write_rows(stream, kept[stream])
        writer.close()

    def _records(self, spool: Spool) -> dict[str, list[Any]]:
        tensors = [[[shape, dtype, DEVICE] for shape, dtype, _ in batch] for batch in spool.records["tensors"]]
        device = {"device": DEVICE, "kind": "cuda", "name": "Modelled", "capacity_bytes": 2**34, "uuid": ""}
        segments = [record for one in self._allocator.segments.values() for record in self._mapped(one)]
        end_ns = int(self._memory_events.time_ns[-1])
        found: dict[str, list[Any]] = {
            "tensors": tensors,
            "devices": [[DEVICE]],
            "device": [device],
            "start": [{**spool.records["start"][0], "is_late": False}],
        }
        found["segments"] = [{"time_ns": end_ns, "segments": segments}]
        return found

    def _mapped(self, segment: Segment) -> list[dict[str, Any]]:
        """Returns a segment as a snapshot shows it: of an expandable one, each stretch that is mapped."""
        stretches: list[list[Block]] = [[]]
        for block in segment.blocks():
            if block.state == UNMAPPED:
                stretches.append([])
            else:
                stretches[-1].append(block)
        requested = {id(block): size for block, size in self._held.values()}
        return [
            {
                "device": 0,
                "address": blocks[0].address,
                "total_size": sum(block.size for block in blocks),
                "allocated_size": sum(block.size for block in blocks if block.state == ALLOCATED),
                "active_size": sum(block.size for block in blocks if block.state in (ALLOCATED, PENDING)),
                "requested_size": sum(requested.get(id(block), 0) for block in blocks),
                "stream": 0,
                "type": "small" if segment.pool.is_small else "large",
                "pool": [0, 0],
                "is_expandable": segment.is_expandable,
            }
            for blocks in stretches
            if blocks
        ]
