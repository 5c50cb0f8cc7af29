"""Recorded memory events of one device: allocations and frees in order, and the blocks in use before them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.assemble.allocator_history import NO_HISTORY, History, block_bytes, last_at, read_history
from memprof.trace.assemble.memory.block_lives import outside_events, own_events, with_outside
from memprof.trace.assemble.steps import Epoch
from memprof.trace.files.spool import DRY_RUN, Spool
from memprof.trace.schema import NONE, Ints

#: The CPU, whose memory events have their own stream.
CPU = "cpu"
#: Half the maximum error of a time truncated to whole microseconds.
_HALF_US = 500
#: Longest time between an entry and its report where it is not certain which reports belong to which entries.
_REPORTED_WITHIN_US = 50
#: The allocator does not split off a remainder of a large block up to this size (c10/cuda/CUDACachingAllocator.cpp,
#: kSmallSize).
_UNSPLIT_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class DeviceEvents:
    """Events of one device, by time; each of shape ``(events,)``.

    Attributes:
        device: The device, such as ``cpu`` or ``cuda:0``.
        time_ns: Time of each event.
        address: Address of the block.
        size_bytes: Block size in bytes, negative for frees.
        total: The allocator's own count of allocated bytes afterwards; -1 where not reported.
        reserved: Its count of reserved bytes; NONE where it has or reports none.
        requested: Requested bytes; NONE where unknown.
        alive_address: Blocks in use before the first event. Shape (alive,).
        alive_bytes: Their sizes in bytes.
        alive_requested: Their requested bytes; NONE where unknown.
        history: The allocator's own history; without rows where it keeps none.
        lost: By how many the allocator's reports outnumber that history's allocations and frees: at least so many of
            these are missing.
    """

    device: str
    time_ns: Ints
    address: Ints
    size_bytes: Ints
    total: Ints
    reserved: Ints
    requested: Ints
    alive_address: Ints
    alive_bytes: Ints
    alive_requested: Ints
    history: History
    lost: int = 0

    @cached_property
    def event_of_entry(self) -> Ints:
        """The event that reports each history entry; NONE where none does. Shape (entries,).

        The allocator writes an entry just before it reports the event: it is the last such entry at that address.
        """
        history = self.history
        event = np.full(len(history), NONE, dtype=np.int64)
        for is_kind, is_side in (
            (history.is_allocating, self.size_bytes > 0),
            (history.is_freeing, self.size_bytes < 0),
        ):
            entries, events = np.flatnonzero(is_kind), np.flatnonzero(is_side)
            found = last_at(
                history.address[entries], history.time_us[entries], self.address[events], self.time_ns[events]
            )
            is_found = found != NONE
            event[entries[found[is_found]]] = events[is_found]
        return event


def devices_of(spool: Spool, epoch: Epoch) -> list[str]:
    """Returns the devices with memory events in an epoch, the most bytes first; the CPU where there are none.

    A job that trains on a device also has its batches on the CPU; the device takes precedence.
    """
    names: list[str] = texts.listed(spool, "devices")
    size = np.zeros(len(names), dtype=np.int64)
    has_events = np.zeros(len(names), dtype=np.bool_)
    for stream in ("device_events", "device_sizes", "device_alive"):
        rows = within(spool.columns(stream), epoch)
        has_events[rows["device"]] = True
        np.add.at(size, rows["device"], np.maximum(rows["size_bytes"], 0))
    history = spool.columns("history")
    has_events[history["device"]] = True
    order = np.argsort(-size, kind="stable")
    return [names[number] for number in order.tolist() if has_events[number]] or [CPU]


def read_device_events(spool: Spool, epoch: Epoch, device: str) -> DeviceEvents:
    """Returns the events of a device.

    For a device they come from the allocator's own history, with the sizes that it reported to the profiler, else from
    weak references.
    """
    if device == CPU:
        return _on_cpu(spool, epoch)
    number = texts.listed(spool, "devices").index(device)
    events = _of_device(within(spool.columns("device_events"), epoch), number)
    alive = _alive_before(_of_device(within(spool.columns("device_alive"), epoch), number), events)
    history = read_history(spool, epoch, number, alive)
    if epoch.source != DRY_RUN and len(history):
        return _from_history(device, history, alive, _of_device(within(spool.columns("device_sizes"), epoch), number))
    in_use = alive["is_pending"] == 0
    address = alive["address"][in_use]
    is_own = own_events(events["time_ns"], events["address"], events["size_bytes"], events["total"], address)
    events = {name: values[is_own] for name, values in events.items()}
    order = np.argsort(events["time_ns"], kind="stable")
    events = {name: values[order] for name, values in events.items()}
    return DeviceEvents(
        device=device,
        time_ns=events["time_ns"],
        address=events["address"],
        size_bytes=events["size_bytes"],
        total=events["total"],
        reserved=events["reserved"],
        requested=_requested(events, history),
        alive_address=address,
        alive_bytes=alive["size_bytes"][in_use],
        alive_requested=alive["requested_bytes"][in_use],
        history=history,
    )


def within(columns: dict[str, Ints], epoch: Epoch) -> dict[str, Ints]:
    """Restricts the columns of a timed stream to an epoch."""
    moment = columns["enter_ns"] if "enter_ns" in columns else columns["time_ns"]
    is_inside = (moment >= epoch.start_ns) & (moment < epoch.end_ns)
    return {name: values[is_inside] for name, values in columns.items()}


def _on_cpu(spool: Spool, epoch: Epoch) -> DeviceEvents:
    events, alive = within(spool.columns("events"), epoch), within(spool.columns("alive"), epoch)
    is_outside = outside_events(events, alive, is_native=epoch.source == "native")
    own, in_use = {name: values[~is_outside] for name, values in events.items()}, alive["size_bytes"] > 0
    is_own = is_outside.copy()
    is_own[~is_outside] = own_events(
        own["time_ns"], own["address"], own["size_bytes"], own["total"], alive["address"][in_use]
    )
    is_own &= events["size_bytes"] != 0  # else a mark: all events up to here have been recorded
    order = np.flatnonzero(is_own)
    order = order[np.argsort(events["time_ns"][order], kind="stable")]
    size_bytes, is_outside = events["size_bytes"][order], is_outside[order]
    before = -int(alive["size_bytes"][~in_use].sum())
    unknown = np.full(len(order), NONE, dtype=np.int64)
    # Python also holds tensors on devices, but their memory is not the CPU's.
    is_here = ~np.isin(alive["address"], spool.columns("device_alive")["address"])
    return DeviceEvents(
        device=CPU,
        time_ns=events["time_ns"][order],
        address=events["address"][order],
        size_bytes=size_bytes,
        total=with_outside(size_bytes, events["total"][order], is_outside, before),
        reserved=unknown,
        requested=unknown,
        alive_address=alive["address"][is_here],
        alive_bytes=np.abs(alive["size_bytes"][is_here]),
        alive_requested=np.full(int(is_here.sum()), NONE, dtype=np.int64),
        history=NO_HISTORY,
    )


def _of_device(columns: dict[str, Ints], number: int) -> dict[str, Ints]:
    is_its = columns["device"] == number
    return {name: values[is_its] for name, values in columns.items()}


def _alive_before(alive: dict[str, Ints], events: dict[str, Ints]) -> dict[str, Ints]:
    """Drops initial blocks whose allocation was recorded: the device may be first used within the epoch."""
    if not len(alive["address"]):
        return alive
    stated_ns = alive["time_ns"][0]
    taken = events["address"][(events["size_bytes"] > 0) & (events["time_ns"] < stated_ns)]
    is_kept = (alive["time_ns"] == stated_ns) & ~np.isin(alive["address"], taken)
    return {name: values[is_kept] for name, values in alive.items()}


def _requested(events: dict[str, Ints], history: History) -> Ints:
    """Returns the requested bytes of each allocation: its history entry directly precedes the report."""
    requested = np.full(len(events["time_ns"]), NONE, dtype=np.int64)
    allocations = np.flatnonzero(events["size_bytes"] > 0)
    entries = np.flatnonzero(history.is_allocating)
    found = last_at(
        history.address[entries],
        history.time_us[entries],
        events["address"][allocations],
        events["time_ns"][allocations],
    )
    is_found = found != NONE
    requested[allocations[is_found]] = history.size_bytes[entries[found[is_found]]]
    return requested


def _from_history(device: str, history: History, alive: dict[str, Ints], reports: dict[str, Ints]) -> DeviceEvents:
    """Builds events from the allocator's history and its reports to the profiler.

    Where an entry was not reported, as those of the job's other threads are not, the size of its block is the
    requested size rounded up; the allocator's count is then unknown.
    """
    rows = np.flatnonzero(history.is_allocating | history.is_freeing)
    taking = history.is_allocating[rows]
    sign = np.where(taking, 1, -1)
    report = _reports_of(history.time_us[rows], sign * history.size_bytes[rows], reports)
    is_reported = report != NONE
    taken = np.full(len(history), NONE, dtype=np.int64)
    taken[rows] = np.where(is_reported & taking, reports["size_bytes"][report], NONE) if is_reported.any() else NONE
    size = sign * block_bytes(history, taken)[rows]
    in_use = alive["is_pending"] == 0
    # Entries without a report tie, as times are truncated to microseconds; their order in the history decides.
    time_ns = history.time_us[rows] * 1000 + _HALF_US
    time_ns[is_reported] = reports["time_ns"][report[is_reported]]
    is_counted = bool(is_reported.all())
    total = int(alive["size_bytes"][in_use].sum()) + np.cumsum(size)
    return DeviceEvents(
        device=device,
        time_ns=np.maximum.accumulate(time_ns) if len(rows) else rows,
        address=history.address[rows],
        size_bytes=size,
        total=total if is_counted else np.full(len(rows), -1, dtype=np.int64),
        reserved=history.reserved[rows],
        requested=np.where(taking, history.size_bytes[rows], NONE),
        alive_address=alive["address"][in_use],
        alive_bytes=alive["size_bytes"][in_use],
        alive_requested=alive["requested_bytes"][in_use],
        history=history,
        lost=max(int((reports["time_ns"] // 1000 >= history.time_us[0] - 1).sum()) - len(rows), 0),
    )


def _reports_of(time_us: Ints, requested: Ints, reports: dict[str, Ints]) -> Ints:
    """Returns the report of each entry of a history that allocates or frees; NONE without one. Shape (entries,).

    The allocator reports what it writes into its history, in the same order.

    Args:
        time_us: Times of the entries. Shape (entries,).
        requested: Their requested bytes, negative for frees. Shape (entries,).
        reports: Times in nanoseconds and block sizes, by column.
    """
    order = np.argsort(reports["time_ns"], kind="stable")
    size, moment_us = reports["size_bytes"][order], reports["time_ns"][order] // 1000
    if len(size) == len(requested) and (np.sign(size) == np.sign(requested)).all():
        return order
    found: list[int] = []
    waiting = deque(zip(order.tolist(), moment_us.tolist(), size.tolist(), strict=True))
    for entered_us, asked in zip(time_us.tolist(), requested.tolist(), strict=True):
        while waiting and waiting[0][1] < entered_us - 1:
            waiting.popleft()  # from before the history began
        number, reported_us, block = waiting[0] if waiting else (NONE, 0, 0)
        is_its = (block > 0) == (asked > 0) and 0 <= abs(block) - abs(asked) <= _UNSPLIT_BYTES
        if number != NONE and is_its and reported_us <= entered_us + _REPORTED_WITHIN_US:
            found.append(number)
            waiting.popleft()
        else:
            found.append(NONE)
    return np.array(found, dtype=np.int64)
