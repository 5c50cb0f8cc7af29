"""Pairs allocator actions into lives: allocations, frees, and what existed before."""

from __future__ import annotations

from collections.abc import Callable
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

#: Rounding granularity of CUDA's allocator (c10/cuda/CUDACachingAllocator, kMinBlockSize).
ROUNDING_BYTES = 512


@dataclass(frozen=True, eq=False)
class Allocations:
    """One row per life of a block, those from before the window first; each column of shape ``(lives,)``.

    Attributes:
        alloc: Entry that allocated it; NONE if it existed before the window.
        free: Entry that freed it (``free_requested``; ``free_completed`` in a history without these); NONE if it is
            alive at the end.
        requested: Requested bytes.
        allocated: Allocated bytes: the size of its block where known, else rounded as the allocator does.
        block: The block in the end state; NONE if it is gone by then.
        clashes: Number of contradictory entries: double frees, or allocations over memory in use.
    """

    alloc: Ints
    free: Ints
    requested: Ints
    allocated: Ints
    block: Ints
    clashes: int

    def __len__(self) -> int:
        return len(self.alloc)


#: Returns the block size of each entry that allocates or frees, 0 where unknown, shape ``(entries,)``, from a device's
#: history, its blocks and segments at the end, and the allocator's settings.
BlockSizes = Callable[[Entries, Blocks, Segments, str], Ints]


def find_lives(
    entries: Entries, blocks: Blocks, rounding: int = ROUNDING_BYTES, sizes: Ints | None = None
) -> Allocations:
    """Pairs allocations with frees, and adds everything that existed before the window.

    A free counts when it is requested; its completion only means that other streams are done with the memory. In a
    history recorded without the requests (``skip_actions=["free_requested"]``), it counts when it is completed.

    Args:
        entries: The history of one device.
        blocks: Its end state.
        rounding: The allocator's rounding granularity.
        sizes: The block size of each entry, 0 where unknown; all unknown where left out.
    """
    # A single completion is that of a free before the window.
    is_requested = bool((entries.action == FREE_REQUESTED).any()) or len(entries) == 1
    ending = FREE_REQUESTED if is_requested else FREE_COMPLETED
    rows = np.flatnonzero((entries.action == ALLOC) | np.isin(entries.action, (ending, FREE)))
    order = rows[np.argsort(entries.address[rows], kind="stable")]
    address, is_alloc = entries.address[order], entries.action[order] == ALLOC
    same_as_last = np.zeros(len(order), dtype=np.bool_)
    same_as_last[1:] = address[1:] == address[:-1]
    after_alloc = np.zeros(len(order), dtype=np.bool_)
    after_alloc[1:] = same_as_last[1:] & is_alloc[:-1]
    # Whatever follows an allocation at its address ends it, even another allocation.
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
    if sizes is not None:
        own = np.concatenate((sizes[gone], np.zeros(len(left), dtype=np.int64), sizes[born[by_time]]))
        allocated = np.where(own > 0, own, allocated)
    allocated[known] = blocks.size[block[known]]
    # Most are freed or untouched: the first part is freed in the window, the second never, the third as paired.
    return Allocations(
        alloc=np.concatenate((np.full(len(gone) + len(left), NONE), born[by_time])).astype(np.int64),
        free=np.concatenate((gone, np.full(len(left), NONE), freed_by[is_alloc][by_time])).astype(np.int64),
        requested=requested,
        allocated=allocated,
        block=block,
        clashes=clashes,
    )


def _blocks_at_end(address: Ints, is_open: Bools, blocks: Blocks) -> Ints:
    """Returns the block of each allocation that was never freed; NONE for the others, and where there is none."""
    found = np.full(len(address), NONE, dtype=np.int64)
    if not len(blocks):
        return found
    order = np.argsort(blocks.address, kind="stable")
    places = np.minimum(np.searchsorted(blocks.address[order], address), len(order) - 1)
    hits = is_open & (blocks.address[order][places] == address) & ~blocks.is_pending[order][places]
    found[hits] = order[places][hits]
    # Of two allocations open at one address only one can be the block; after the sort it is the last.
    return found


@dataclass(frozen=True, eq=False)
class Reserved:
    """Reserved bytes of the allocator.

    Attributes:
        start: Bytes before the first entry.
        after: Bytes after each entry, shape ``(entries,)``.
        end: Bytes at the end, from the segments.
    """

    start: int
    after: Ints
    end: int

    @classmethod
    def unknown(cls, entries: int) -> Reserved:
        """Returns those of a file that does not contain them, below 0."""
        return cls(NONE, np.full(entries, NONE, dtype=np.int64), NONE)

    @property
    def peak(self) -> int:
        """Peak reserved bytes in the window."""
        return max(self.start, int(self.after.max(initial=self.start)))


def find_reserved(entries: Entries, segments: Segments) -> Reserved:
    """Computes reserved bytes backwards from the end state."""
    end = int(segments.total_size_bytes.sum())
    grows, shrinks = np.isin(entries.action, SEGMENT_GROWS), np.isin(entries.action, SEGMENT_SHRINKS)
    change = np.where(grows, entries.size, np.where(shrinks, -entries.size, 0))
    after = end - (change.sum() - np.cumsum(change))
    return Reserved(start=end - int(change.sum()), after=after, end=end)


def pending_after(entries: Entries, blocks: Blocks) -> Ints:
    """Returns the bytes pending free after each entry, computed backwards from the end state.

    A history without either of a free's two entries does not show for how long it is pending.
    """
    if not ((entries.action == FREE_REQUESTED).any() and (entries.action == FREE_COMPLETED).any()):
        return np.zeros(len(entries), dtype=np.int64)
    change = np.where(entries.action == FREE_REQUESTED, entries.size, 0)
    change = change - np.where(entries.action == FREE_COMPLETED, entries.size, 0)
    after: Ints = int(blocks.size[blocks.is_pending].sum()) - (change.sum() - np.cumsum(change))
    return np.maximum(after, 0)
