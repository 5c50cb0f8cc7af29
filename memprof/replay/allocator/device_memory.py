"""Takes memory from the device and gives it back: expandable segments, and segments that are wholly free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.replay.allocator.blocks import FREE, UNMAPPED, Block, Pool
from memprof.replay.allocator.rules import ASSUMED_DEVICE_BYTES, Settings

if TYPE_CHECKING:
    from memprof.replay.allocator.blocks import AllocatorState


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
    segment = block.segment
    segment.pool.remove(block)
    del allocator.segments[segment.address]
    allocator.reserved -= block.size
    allocator.write("segment_free", block.address, block.size, segment.pool.stream)


def expandable_span(settings: Settings, page_bytes: int, size: int) -> int:
    """Returns the bytes of a new expandable segment's address range: an eighth more than the device, in whole pages.

    Args:
        settings: The allocator's settings; of a device of unknown size, the range is large enough for the request.
        page_bytes: The pool's page size.
        size: Bytes of the request.
    """
    device = settings.capacity_bytes or max(ASSUMED_DEVICE_BYTES, size)
    return -(-(device + device // 8) // page_bytes) * page_bytes


def find_growth(pool: Pool, size: int) -> Block | None:
    """Finds the lowest free or unmapped block from which ``size`` contiguous bytes are available.

    Args:
        pool: The pool to search.
        size: Bytes needed.

    Returns:
        An unmapped block, or a free one followed by unmapped ones; None where no range has room.
    """
    for address in sorted(pool.unmapped):
        block = pool.unmapped[address]
        if block.previous is not None and block.previous.state == FREE:
            block = block.previous
        room, walker = 0, block
        while room < size and walker is not None and walker.state in (FREE, UNMAPPED):
            room += walker.size
            walker = walker.next  # type: ignore[assignment]  # the loop ends where it is None
        if room >= size:
            return block
    return None


def map_pages(allocator: AllocatorState, block: Block, size: int) -> bool:
    """Maps the first pages of an unmapped block and merges it with its free neighbours.

    Returns:
        False, with nothing changed, where the device is full.
    """
    pool = block.segment.pool
    mapped = min(-(-size // pool.page_bytes) * pool.page_bytes, block.size)
    if not allocator.has_room(mapped):
        return False
    del pool.unmapped[block.address]
    block.state = FREE
    start = block.address
    if mapped < block.size:
        rest = allocator.make_block(block.address + mapped, block.size - mapped, block.segment, UNMAPPED)
        rest.place_between(block, block.next)
        pool.unmapped[rest.address] = rest
        block.size = mapped
    join_neighbours(block)
    pool.add(block)
    allocator.reserved += mapped
    allocator.write("segment_map", start, mapped, pool.stream)
    return True


def release_pages(allocator: AllocatorState, block: Block) -> None:
    """Unmaps the whole pages inside a free block; a segment without mapped pages is removed too."""
    pool, segment = block.segment.pool, block.segment
    base, page = segment.address, pool.page_bytes
    start = base + -(-(block.address - base) // page) * page
    end = base + (block.address + block.size - base) // page * page
    if end <= start:
        return
    pool.remove(block)
    before, behind = start - block.address, block.address + block.size - end
    if before:
        front = allocator.make_block(block.address, before, segment)
        front.place_between(block.previous, block)
        pool.add(front)
    if behind:
        rest = allocator.make_block(end, behind, segment)
        rest.place_between(block, block.next)
        pool.add(rest)
    block.address, block.size, block.state = start, end - start, UNMAPPED
    join_neighbours(block)
    pool.unmapped[block.address] = block
    allocator.reserved -= end - start
    allocator.write("segment_unmap", start, end - start, pool.stream)
    if not block.is_split():
        del pool.unmapped[block.address]
        del allocator.segments[segment.address]


def join_neighbours(block: Block) -> None:
    """Merges a free or an unmapped block, not yet in its pool, with its neighbours of the same state."""
    previous, following, state = block.previous, block.next, block.state
    if previous is not None and previous.state == state:
        _take_out(previous)
        block.address = previous.address
        block.size += previous.size
        block.place_between(previous.previous, following)
    if following is not None and following.state == state:
        _take_out(following)
        block.size += following.size
        block.place_between(block.previous, following.next)


def _take_out(block: Block) -> None:
    if block.state == FREE:
        block.segment.pool.remove(block)
    else:
        del block.segment.pool.unmapped[block.address]
