"""A device allocator's own history in a recording: requested bytes, pending frees, segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.assemble.steps import Epoch
from memprof.trace.assemble.timeline import first_rows
from memprof.trace.files.spool import Spool
from memprof.trace.importers.allocations import ROUNDING_BYTES
from memprof.trace.importers.columns import (
    ALLOC,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_GROWS,
    SEGMENT_SHRINKS,
    read_segments,
)
from memprof.trace.schema import NONE, Bools, Ints, Segments


@dataclass(frozen=True, eq=False)
class History:
    """History entries of one device in allocator order; each of shape ``(entries,)``.

    Attributes:
        time_us: Time, in whole microseconds.
        action: An index into ``schema.ACTIONS``.
        address: Address; for ``oom`` entries the free bytes.
        size_bytes: Requested bytes.
        stream: Stream.
        pool: Memory pool number, 0 for the default pool.
        reserved: Reserved bytes after each entry; NONE without an end state.
        alive: Blocks in use before the first, by column of the spool's ``device_alive``.
    """

    time_us: Ints
    action: Ints
    address: Ints
    size_bytes: Ints
    stream: Ints
    pool: Ints
    reserved: Ints
    alive: dict[str, Ints]

    def __len__(self) -> int:
        return len(self.action)

    @property
    def is_allocating(self) -> Bools:
        """Which entries allocate a block."""
        return np.isin(self.action, ALLOC)

    @property
    def is_freeing(self) -> Bools:
        """Which entries free a block (other streams may still be using it)."""
        return np.isin(self.action, (FREE, FREE_REQUESTED))

    @property
    def is_growth(self) -> Bools:
        """Which entries allocate a segment from the device; each directly precedes the allocation that needs it."""
        return np.isin(self.action, SEGMENT_GROWS)


_EMPTY = np.zeros(0, dtype=np.int64)
NO_HISTORY = History(
    _EMPTY,
    _EMPTY,
    _EMPTY,
    _EMPTY,
    _EMPTY,
    _EMPTY,
    _EMPTY,
    dict.fromkeys(("time_ns", "device", "address", "size_bytes", "requested_bytes", "stream", "is_pending"), _EMPTY),
)


def read_history(spool: Spool, epoch: Epoch, device: int, alive: dict[str, Ints]) -> History:
    """Reads the history entries of a device in an epoch.

    Args:
        spool: The raw recording.
        epoch: The epoch to report.
        device: Device number.
        alive: The device's blocks in use before the first entry.
    """
    columns = spool.columns("history")
    moment = columns["time_us"] * 1000
    is_kept = (columns["device"] == device) & (moment + 999 >= epoch.start_ns) & (moment < epoch.end_ns)
    kept = {name: values[is_kept] for name, values in columns.items()}
    growth = np.where(np.isin(kept["action"], SEGMENT_GROWS), kept["size_bytes"], 0)
    growth -= np.where(np.isin(kept["action"], SEGMENT_SHRINKS), kept["size_bytes"], 0)
    end = _reserved_at_end(spool, epoch, device)
    after = np.cumsum(growth)
    reserved = np.full(len(growth), NONE) if end == NONE or not len(growth) else after + (end - after[-1])
    return History(
        time_us=kept["time_us"],
        action=kept["action"],
        address=kept["address"],
        size_bytes=kept["size_bytes"],
        stream=kept["stream"],
        pool=kept["pool"],
        reserved=reserved.astype(np.int64),
        alive=alive,
    )


def block_bytes(history: History, taken_bytes: Ints | None = None) -> Ints:
    """Returns the size of the block each entry refers to. Shape (entries,).

    Args:
        history: The entries.
        taken_bytes: Block size of each allocating entry where an event recorded it; NONE elsewhere. Shape (entries,).
            Other sizes are rounded up; the real block may be larger when the allocator did not split it.
    """
    size = -(-history.size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
    if taken_bytes is not None:
        size = np.where(taken_bytes == NONE, size, taken_bytes)
    taking = _taking_of(history)
    size = np.where(taking == NONE, size, size[np.maximum(taking, 0)])
    older = np.flatnonzero(taking == NONE)
    row = first_rows(history.alive["address"], history.address[older])
    size[older[row != NONE]] = history.alive["size_bytes"][row[row != NONE]]
    return size


def pending_bytes(history: History, size: Ints) -> Ints:
    """Returns the bytes pending free (in use by another stream) after each entry. Shape (entries,).

    Args:
        history: The entries.
        size: Block size of each entry, as returned by ``block_bytes``.
    """
    is_requested = history.action == FREE_REQUESTED
    is_completed = history.action == FREE_COMPLETED
    before = int(history.alive["size_bytes"][history.alive["is_pending"] == 1].sum())
    pending: Ints = before + np.cumsum(np.where(is_requested, size, 0) - np.where(is_completed, size, 0))
    return pending


def _taking_of(history: History) -> Ints:
    """Returns the entry that allocated each entry's block; NONE for blocks already in use. Shape (entries,)."""
    count = len(history)
    order = np.lexsort((np.arange(count), history.address))
    is_first = np.ones(count, dtype=np.bool_)
    is_first[1:] = history.address[order][1:] != history.address[order][:-1]
    latest = np.maximum.accumulate(np.where(history.is_allocating[order], np.arange(count), NONE))
    begins = np.maximum.accumulate(np.where(is_first, np.arange(count), 0))
    taking = np.full(count, NONE, dtype=np.int64)
    taking[order] = np.where(latest >= begins, order[np.maximum(latest, 0)], NONE) if count else latest
    return taking


def last_at(address: Ints, time_us: Ints, wanted_address: Ints, wanted_ns: Ints) -> Ints:
    """Finds the last row at each address no later than a given time.

    Args:
        address: Addresses of the rows. Shape (rows,).
        time_us: Their times, in whole microseconds.
        wanted_address: Addresses to look up. Shape (wanted,).
        wanted_ns: Times to look up, in nanoseconds.

    Returns:
        Rows; NONE where there is none. Shape (wanted,).
    """
    nothing = np.full(len(wanted_address), NONE, dtype=np.int64)
    if not len(address) or not len(wanted_address):
        return nothing
    order = np.lexsort((np.arange(len(address)), time_us, address))
    known, code = np.unique(address, return_inverse=True)
    start = min(int(time_us.min()), int(wanted_ns.min()) // 1000)
    span = max(int(time_us.max()), int(wanted_ns.max()) // 1000) - start + 2
    keys = (code * span + (time_us - start))[order]
    place = np.minimum(np.searchsorted(known, wanted_address), len(known) - 1)
    row = np.searchsorted(keys, place * span + (wanted_ns // 1000 - start), side="right") - 1
    found = order[np.maximum(row, 0)]
    is_found = (row >= 0) & (known[place] == wanted_address) & (address[found] == wanted_address)
    return np.where(is_found, found, NONE)


def segment_table(spool: Spool, epoch: Epoch, device: str) -> Segments:
    """Builds the table of a device's segments at the end of an epoch; empty if not recorded."""
    return read_segments(
        [
            {**one, "segment_type": one["type"], "segment_pool_id": one["pool"]}
            for one in _segments_at_end(spool, epoch)
            if f"cuda:{one['device']}" == device
        ],
        device,
    )


def _reserved_at_end(spool: Spool, epoch: Epoch, device: int) -> int:
    segments = _segments_at_end(spool, epoch)
    if not segments:
        return NONE
    name = texts.listed(spool, "devices")[device]
    return sum(int(one["total_size"]) for one in segments if f"cuda:{one['device']}" == name)


def _segments_at_end(spool: Spool, epoch: Epoch) -> list[dict[str, Any]]:
    records = [one for one in spool.records.get("segments", []) if epoch.start_ns <= one["time_ns"] < epoch.end_ns]
    return list(records[-1]["segments"]) if records else []
