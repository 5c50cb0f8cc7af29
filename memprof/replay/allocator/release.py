"""Releases memory to the device: wholly free segments, when it is full, on request, or past a threshold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.replay.allocator.blocks import Block, Pool
from memprof.replay.allocator.expandable import release_pages

if TYPE_CHECKING:
    from memprof.replay.allocator.state import AllocatorState


def release_cached(allocator: AllocatorState) -> None:
    """Releases every wholly free segment; large ones first, each pool's smallest first.

    Private pools keep theirs, since a captured graph may be replayed.
    """
    for is_small in (False, True):
        pools = [pool for pool in allocator.pools() if pool.is_small is is_small and not pool.owner]
        to_unmap = []
        for pool in sorted(pools, key=lambda pool: pool.stream):
            for block in pool.free_blocks():
                if block.segment.is_expandable:
                    to_unmap.append(block)
                elif not block.is_split():
                    _release(allocator, block)
        for block in to_unmap:
            release_pages(allocator, block)


def release_oversized(allocator: AllocatorState, pool: Pool, size: int) -> bool:
    """Releases blocks too large to be split, until a request would fit.

    Returns:
        Whether enough was released; False, with nothing done, where every block may be split.
    """
    most = allocator.settings.max_split_size_bytes
    if most is None:
        return False
    needed = max(size, most)
    block = pool.fitting(needed)
    if block is not None and not block.segment.is_expandable:
        _release(allocator, block)
        return True
    released = 0
    for block in reversed(pool.free_blocks()):
        if released >= needed or block.size < most:
            break
        if not block.segment.is_expandable:
            released += block.size
            _release(allocator, block)
    return released >= needed


def collect_garbage(allocator: AllocatorState) -> None:
    """Releases the oldest free segments until the reserved bytes are below the threshold.

    Age counts searches of the pool. Each round releases those of at least average age.
    """
    settings = allocator.settings
    assert settings.limit_bytes is not None
    target = allocator.reserved - int(settings.garbage_collection_threshold * settings.limit_bytes)
    if target <= 0:
        return
    ages = {
        block: pool.searches - block.age_base
        for pool in sorted(allocator.pools(), key=lambda pool: pool.stream)
        if not pool.is_small and not pool.owner
        for block in pool.free_blocks()
        if not block.is_split() and not block.segment.is_expandable
    }
    reclaimed, total, count = 0, sum(ages.values()), len(ages)
    has_freed = True
    while reclaimed < target and has_freed and count:
        oldest = total / count
        has_freed = False
        for block, age in list(ages.items()):
            if age >= oldest:
                has_freed = True
                reclaimed += block.size
                total -= age
                count -= 1
                del ages[block]
                _release(allocator, block)


def _release(allocator: AllocatorState, block: Block) -> None:
    """Releases a wholly free segment to the device."""
    segment = block.segment
    segment.pool.remove(block)
    del allocator.segments[segment.address]
    allocator.reserved -= block.size
    allocator.write("segment_free", block.address, block.size, segment.pool.stream)
