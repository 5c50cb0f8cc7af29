"""From the actions of an allocator to lives: what was taken when, given back when, and there from before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.importers.columns import (
    ALLOC,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_GROWS,
    SEGMENT_SHRINKS,
    Blocks,
    Entries,
)
from memprof.trace.schema import NONE, Bools, Ints, Segments

#: What CUDA's allocator rounds sizes up to (c10/cuda/CUDACachingAllocator, kMinBlockSize).
_ROUNDING_BYTES = 512


@dataclass(frozen=True, eq=False)
class Allocations:
    """One row for each life of a block, those from before the window first; each column of shape ``(lives,)``.

    Attributes:
        alloc: Entry that took it, NONE for what was there before.
        free: Entry that gave it back (``free_requested``), NONE for what is left at the end.
        requested: Bytes asked for.
        allocated: Bytes set aside: the block's own where the end state shows it, else rounded as the allocator does.
        block: The block of the end state, NONE for what is gone by then.
        clashes: Entries that contradict others: memory given back twice, or taken where some was in use.
    """

    alloc: Ints
    free: Ints
    requested: Ints
    allocated: Ints
    block: Ints
    clashes: int

    def __len__(self) -> int:
        """Returns the number of lives."""
        return len(self.alloc)


def find_lives(entries: Entries, blocks: Blocks, rounding: int = _ROUNDING_BYTES) -> Allocations:
    """Pairs what was taken with what was given back, and adds everything that was there before the window.

    Memory is given back when that is requested; that it is complete only tells that other streams are done with it.

    Args:
        entries: The history of one device.
        blocks: Its end state.
        rounding: What the allocator rounds sizes up to.
    """
    rows = np.flatnonzero((entries.action == ALLOC) | np.isin(entries.action, (FREE_REQUESTED, FREE)))
    order = rows[np.argsort(entries.address[rows], kind="stable")]
    address, is_alloc = entries.address[order], entries.action[order] == ALLOC
    same_as_last = np.zeros(len(order), dtype=np.bool_)
    same_as_last[1:] = address[1:] == address[:-1]
    after_alloc = np.zeros(len(order), dtype=np.bool_)
    after_alloc[1:] = same_as_last[1:] & is_alloc[:-1]
    # What follows an allocation at its address ends it, be it another allocation.
    freed_by = np.full(len(order), NONE, dtype=np.int64)
    freed_by[:-1] = np.where(after_alloc[1:], order[1:], NONE)
    is_from_before = ~is_alloc & ~same_as_last
    clashes = int(np.count_nonzero(is_alloc & after_alloc) + np.count_nonzero(~is_alloc & same_as_last & ~after_alloc))

    block_of = _blocks_at_end(address, is_alloc & (freed_by == NONE), blocks)
    born, gone = order[is_alloc], order[is_from_before]
    is_matched = np.zeros(len(blocks), dtype=np.bool_)
    is_matched[block_of[block_of != NONE]] = True
    left = np.flatnonzero(~is_matched & ~blocks.is_pending)
    by_time = np.argsort(born)
    block = np.concatenate((np.full(len(gone), NONE), left, block_of[is_alloc][by_time])).astype(np.int64)
    requested = np.concatenate((entries.size[gone], blocks.requested[left], entries.size[born[by_time]]))
    known = block != NONE
    allocated = -(-requested // rounding) * rounding
    allocated[known] = blocks.size[block[known]]
    # Most are gone or left alone: the first part is freed in the window, the second never, the third as paired.
    return Allocations(
        alloc=np.concatenate((np.full(len(gone) + len(left), NONE), born[by_time])).astype(np.int64),
        free=np.concatenate((gone, np.full(len(left), NONE), freed_by[is_alloc][by_time])).astype(np.int64),
        requested=requested,
        allocated=allocated,
        block=block,
        clashes=clashes,
    )


def _blocks_at_end(address: Ints, is_open: Bools, blocks: Blocks) -> Ints:
    """Returns the block of each allocation that was never freed, NONE for others and where there is none."""
    found = np.full(len(address), NONE, dtype=np.int64)
    if not len(blocks):
        return found
    order = np.argsort(blocks.address, kind="stable")
    places = np.minimum(np.searchsorted(blocks.address[order], address), len(order) - 1)
    hits = is_open & (blocks.address[order][places] == address) & ~blocks.is_pending[order][places]
    found[hits] = order[places][hits]
    # Two allocations that are both open at one address cannot both be the block; the sort left the last one open.
    return found


@dataclass(frozen=True, eq=False)
class Reserved:
    """What the allocator holds of the device.

    Attributes:
        start: Bytes before the first entry.
        after: Bytes after each entry, shape ``(entries,)``.
        end: Bytes at the end, as the segments tell.
    """

    start: int
    after: Ints
    end: int

    @property
    def peak(self) -> int:
        """The most it holds in the window."""
        return max(self.start, int(self.after.max(initial=self.start)))


def find_reserved(entries: Entries, segments: Segments) -> Reserved:
    """Counts segments backwards from the end state."""
    end = int(segments.total_size_bytes.sum())
    grows, shrinks = np.isin(entries.action, SEGMENT_GROWS), np.isin(entries.action, SEGMENT_SHRINKS)
    change = np.where(grows, entries.size, np.where(shrinks, -entries.size, 0))
    after = end - (change.sum() - np.cumsum(change))
    return Reserved(start=end - int(change.sum()), after=after, end=end)


def pending_after(entries: Entries, blocks: Blocks) -> Ints:
    """Returns the bytes that wait for other streams after each entry, counted backwards from the end state."""
    change = np.where(entries.action == FREE_REQUESTED, entries.size, 0)
    change = change - np.where(entries.action == FREE_COMPLETED, entries.size, 0)
    after: Ints = int(blocks.size[blocks.is_pending].sum()) - (change.sum() - np.cumsum(change))
    return np.maximum(after, 0)
