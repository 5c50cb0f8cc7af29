"""Memory that no tensor or event accounts for: other libraries', other threads', and what the allocator counts besides.

Every event carries the allocator's own count. Where the count changes by more or less than the event itself, another
thread allocated or freed memory. That memory becomes storages of its own, so that the replay matches the true count.

A collective's own thread drops the last reference to a buffer that the training thread allocated. The allocator's count
shows the free, except where recording began when blocks were in use that it does not count.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import dataclass

import numpy as np

from memprof.machines.card import cublas_workspace_sizes
from memprof.trace.assemble.memory.block_lives import BlockLives
from memprof.trace.assemble.timeline import NEVER, Timeline, first_rows
from memprof.trace.schema import NONE, Bools, Ints, Ops, Texts

#: Limits of the search: at most this many lives in one sum, out of at most this many candidates.
_SUM_OF, _AMONG = 3, 24
#: Smaller blocks are left alone: their size does not identify them.
_LEAST_BYTES = 1024


@dataclass(frozen=True)
class Elsewhere:
    """Storages for memory allocated elsewhere. Shape (storages,) each.

    Attributes:
        size_bytes: Their sizes.
        created: Row during which each appeared; NONE when it existed at the start.
        freed: Row during which each was freed; NONE when it stayed.
        change: Change of the counter at each event. Shape (events,).
        relief: The part freed by the time each row ran, negative. Shape (rows,).
        start_bytes: Bytes before the first event.
        missing_bytes: By how much known memory exceeds the allocator's count at the start; 0 if it does not.
    """

    size_bytes: Ints
    created: Ints
    freed: Ints
    change: Ints
    relief: Ints
    start_bytes: int
    missing_bytes: int

    @classmethod
    def nothing(cls, events: int, rows: int) -> Elsewhere:
        """Returns the account of a recording whose allocator reports no count."""
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, none, np.zeros(events, dtype=np.int64), np.zeros(rows, dtype=np.int64), 0, 0)


def account(timeline: Timeline, lives: BlockLives, totals: Ints) -> Elsewhere:
    """Follows the difference between the allocator's count and the known lives.

    Args:
        timeline: Rows and events.
        lives: Lives of blocks.
        totals: The allocator's count after each event. Shape (events,), at least one.
    """
    known_start = int(lives.size_bytes[lives.born == NONE].sum())
    start = int(totals[0] - timeline.event_bytes[0]) - known_start
    change = np.zeros(len(totals), dtype=np.int64)
    change[1:] = np.diff(totals) - timeline.event_bytes[1:]
    # Known frees do not change the unknown part.
    reused = reused_ends(timeline, lives)
    change -= reused
    relief = np.zeros(len(timeline.raw_op), dtype=np.int64)
    first_event = np.searchsorted(timeline.event_op, np.arange(len(relief)), side="left")
    is_own = (timeline.event_is_inside | (timeline.event_bytes > 0)) & (timeline.event_op != NONE)
    sizes: list[int] = []
    created: list[int] = []
    freed: list[int] = []
    open_units: list[tuple[int, int]] = []  # (bytes, row), the latest last
    if start > 0:
        open_units.append((start, NONE))
    for event in np.flatnonzero(change).tolist():
        amount, row = int(change[event]), int(timeline.event_op[event])
        if amount > 0:
            open_units.append((amount, row))
            continue
        left, passing = -amount, 0
        # Freed while a row ran: gone by then, so the previous row is the last that had it.
        last_seen = row - 1 if is_own[event] else row
        while left and open_units:
            size, since = open_units.pop()
            gone = min(size, left)
            if size > gone:
                open_units.append((size - gone, since))
            left -= gone
            if since == row and is_own[event]:  # a worker thread of the kernel: part of the operator's workspace
                passing += gone
                continue
            if max(last_seen, since) != NONE:  # otherwise it was freed before the first row
                sizes.append(gone)
                created.append(since)
                freed.append(max(last_seen, since))
        change[event] = -passing
        given = amount + left + passing  # memory whose allocation was not seen cannot be freed here
        if is_own[event]:
            relief[row] += given
            change[first_event[row]] += given
        else:
            change[event] += given
    for size, since in open_units:
        sizes.append(size)
        created.append(since)
        freed.append(NONE)
    return Elsewhere(
        size_bytes=np.array(sizes, dtype=np.int64),
        created=np.array(created, dtype=np.int64),
        freed=np.array(freed, dtype=np.int64),
        change=change + np.where(timeline.event_bytes > 0, 0, reused),  # the counter already ends lives at allocations
        relief=relief,
        start_bytes=max(start, 0),
        missing_bytes=max(-start, 0),
    )


def end_missed_frees(timeline: Timeline, lives: BlockLives, totals: Ints) -> BlockLives:
    """Ends lives where the allocator's count falls by their size without an event.

    Args:
        timeline: Rows and events.
        lives: Lives of blocks.
        totals: The allocator's count after each event. Shape (events,), at least one.
    """
    change = np.zeros(len(totals), dtype=np.int64)
    change[1:] = np.diff(totals) - timeline.event_bytes[1:]
    fallen = np.flatnonzero(change <= -_LEAST_BYTES)
    died = lives.died.copy()
    rows = np.flatnonzero(_lacks_free(timeline, lives) & (lives.size_bytes >= _LEAST_BYTES))
    if not len(fallen) or not len(rows):
        return lives
    for event in fallen.tolist():
        alive = rows[(lives.born[rows] < event) & (died[rows] >= event)]
        alive = alive[np.argsort(-lives.born[alive], kind="stable")][:_AMONG]
        found = _sum_to(lives.size_bytes[alive].tolist(), -int(change[event]))
        if found:
            died[alive[found]] = event
            rows = np.setdiff1d(rows, alive[found])
    return dataclasses.replace(lives, died=died)


def end_buffers_of_collectives(
    timeline: Timeline, lives: BlockLives, is_collective: Bools, touched: Ints
) -> BlockLives:
    """Ends buffers that a collective made for itself, and whose free was missed, within the collective.

    Args:
        timeline: Rows and events.
        lives: Lives of blocks.
        is_collective: The rows that are collectives. Shape (rows,).
        touched: Lives that hold a tensor of the collective that allocated them, and are therefore not such buffers.
    """
    died = lives.died.copy()
    is_candidate = _lacks_free(timeline, lives)
    is_candidate[touched] = False
    rows = np.flatnonzero(is_candidate)
    rows = rows[timeline.event_is_inside[lives.born[rows]] & is_collective[timeline.event_op[lives.born[rows]]]]
    for row in rows.tolist():
        born = int(lives.born[row])
        stop = int(np.searchsorted(timeline.event_op, timeline.event_op[born], side="right"))
        inside = born + np.flatnonzero(timeline.event_is_inside[born:stop])
        end = max(int(inside[-1]), born + 1)
        if end < len(timeline.event_bytes):
            died[row] = min(end, int(died[row]))
    return dataclasses.replace(lives, died=died)


def reused_ends(timeline: Timeline, lives: BlockLives) -> Ints:
    """Returns the bytes, negative, of lives that end at another block's event. Shape (events,)."""
    ended = np.zeros(len(timeline.event_bytes), dtype=np.int64)
    rows = np.flatnonzero(lives.died != NEVER)
    rows = rows[timeline.event_address[lives.died[rows]] != lives.address[rows]]
    np.subtract.at(ended, lives.died[rows], lives.size_bytes[rows])
    return ended


def _lacks_free(timeline: Timeline, lives: BlockLives) -> Bools:
    """Returns which lives that began in the recording never end, or end where their address was reused."""
    lacks: Bools = lives.died == NEVER
    ended = np.flatnonzero(~lacks)
    lacks[ended] = timeline.event_bytes[lives.died[ended]] > 0
    lacks &= lives.born != NONE
    return lacks


def _sum_to(sizes: list[int], amount: int) -> list[int]:
    """Returns the positions of the fewest sizes that sum to an amount; empty if none do."""
    for count in range(1, _SUM_OF + 1):
        for places in itertools.combinations(range(len(sizes)), count):
            if sum(sizes[place] for place in places) == amount:
                return list(places)
    return []


#: Libraries by the operators that use them; torch keeps cuBLAS's workspace per thread and stream
#: (aten/src/ATen/cuda/CUDABlas.cpp, CublasHandlePool.cpp), and frees cuDNN's within the operator.
_LIBRARIES = (
    (
        re.compile(r"^aten\.(?:_?addmm|mm|bmm|baddbmm|addbmm|addmv|linear|_scaled_mm|_grouped_mm|matmul|mv|dot)"),
        "cuBLAS",
    ),
    (re.compile(r"conv|cudnn|_thnn_fused_lstm|miopen"), "cuDNN"),
    (re.compile(r"fft"), "cuFFT"),
    (re.compile(r"linalg|cholesky|lu_|svd|qr|eig|triangular"), "cuSOLVER"),
)


@dataclass(frozen=True)
class Foreign:
    """Foreign storages, by ascending address.

    Attributes:
        address: Address of each. Shape (foreign,).
        size_bytes: Size of the largest tensor seen on it.
        first: Raw operator that first returned it; NONE when it was an input before that.
        last: Raw operator that used it last.
        storage: Storage of each use; NONE for uses of torch's own memory. Shape (touches,).
        offset: Number of the first foreign storage.
    """

    address: Ints
    size_bytes: Ints
    first: Ints
    last: Ints
    storage: Ints
    offset: int

    def of_address(self, address: Ints) -> Ints:
        """Returns the storage at each address; NONE where there is none."""
        row = first_rows(self.address, address)
        return np.where(row == NONE, NONE, self.offset + row)


def find_foreign(
    raw_op: Ints, address: Ints, size_bytes: Ints, is_write: Bools, is_foreign: Bools, offset: int
) -> Foreign:
    """Groups uses of foreign memory by address: one storage lives from the first use to the last.

    Args:
        raw_op: Operator of each use. Shape (touches,).
        address: Address of its storage.
        size_bytes: Bytes of its tensor.
        is_write: Uses by the operator that returned the tensor.
        is_foreign: Uses of memory that no allocation explains.
        offset: Number of the first foreign storage.
    """
    unique, code = np.unique(address[is_foreign], return_inverse=True)
    ops = raw_op[is_foreign]
    first = np.full(len(unique), np.iinfo(np.int64).max)
    last = np.zeros(len(unique), dtype=np.int64)
    size = np.zeros(len(unique), dtype=np.int64)
    np.minimum.at(first, code, ops)
    np.maximum.at(last, code, ops)
    np.maximum.at(size, code, size_bytes[is_foreign])
    is_made = np.zeros(len(unique), dtype=np.bool_)
    is_made[code[is_write[is_foreign] & (ops == first[code])]] = True
    storage = np.full(len(address), NONE, dtype=np.int64)
    storage[is_foreign] = offset + code
    return Foreign(unique, size, np.where(is_made, first, NONE), last, storage, offset)


def name_workspaces(
    is_own: Bools, category: Texts, names: Texts, sizes: Ints, created: Ints, freed: Ints, used: Ints, ops: Ops
) -> None:
    """Labels unused storages without recorded facts as workspaces; edits categories and names in place.

    Args:
        is_own: Storages owned by the device's allocator. Shape (storages,).
        category: Their categories.
        names: Their names.
        sizes: Their bytes, as requested.
        created: Row that created each; NONE where older.
        freed: Row after which each was freed; NONE where it stays.
        used: Storages that operators use. Shape (uses,).
        ops: The operators.
    """
    is_touched = np.zeros(len(created), dtype=np.bool_)
    is_touched[used] = True
    is_unowned = is_own & ~is_touched & (names == "") & np.isin(category, ("temporary", "unknown"))
    # Memory of no tensor that outlives its operator. Memory allocated between operators is autograd's.
    is_made = is_unowned & (created != NONE) & ((freed == NONE) | (freed > created))
    is_made[is_made] = ops.kind[created[is_made]] != "allocation"
    for row in np.flatnonzero(is_made).tolist():
        operator = str(ops.name[created[row]])
        library = next((library for pattern, library in _LIBRARIES if pattern.search(operator)), "")
        category[row] = "workspace"
        names[row] = f"{library} workspace" if library else f"workspace of {operator}"
    is_older = is_unowned & (created == NONE)
    names[is_older] = np.where(freed[is_older] == NONE, "held by no Python object", "")
    # The operator that made it, which would show the library, was not recorded.
    is_cublas = is_older & (freed == NONE) & np.isin(sizes, cublas_workspace_sizes())
    category[is_cublas], names[is_cublas] = "workspace", "cuBLAS workspace"
