"""The model of the allocator, against sequences worked out by hand and against what must always hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.replay.allocator.blocks import FREE, UNMAPPED, Block
from memprof.replay.allocator.model import CachingAllocator
from memprof.replay.allocator.rules import TIE_BREAKS, Settings, TieBreak, rounded_request

MIB = 1 << 20


def free(allocator: CachingAllocator, block: Block) -> None:
    allocator.request_free(block)
    allocator.complete_free(block)


def given_out(allocator: CachingAllocator, size: int, stream: int = 0, owner: int = 0) -> Block:
    block = allocator.allocate(size, stream, owner)
    assert block is not None
    return block


def actions(allocator: CachingAllocator) -> list[tuple[str, int]]:
    return [(event.action, event.size) for event in allocator.log]


def check(allocator: CachingAllocator) -> None:
    """What must hold at any time."""
    mapped = 0
    free_blocks = set()
    for segment in allocator.segments.values():
        position, last = segment.address, None
        for block in segment.blocks():
            assert block.address == position
            assert block.size > 0
            assert block.size % 512 == 0
            assert block.previous is last
            assert last is None or not (last.state == block.state == FREE)
            position += block.size
            mapped += block.size if block.state != UNMAPPED else 0
            if block.state == FREE:
                free_blocks.add(block)
            last = block
        assert position == segment.address + segment.size
    assert mapped == allocator.reserved
    assert free_blocks == {block for pool in allocator.pools() for block in pool.free_blocks()}
    assert allocator.largest_free() == max((block.size for block in free_blocks), default=0)


def test_small_requests_share_a_segment_and_large_ones_another() -> None:
    """Three requests of 1 MiB need two segments of 2 MiB; 3 MiB and 4 MiB share one of 20 MiB."""
    allocator = CachingAllocator()
    blocks = [given_out(allocator, size) for size in (MIB, MIB, MIB, 3 * MIB, 4 * MIB)]
    assert actions(allocator) == [("segment_alloc", 2 * MIB), ("segment_alloc", 2 * MIB), ("segment_alloc", 20 * MIB)]
    assert allocator.reserved == 24 * MIB
    assert blocks[1].address == blocks[0].address + MIB
    assert blocks[4].address == blocks[3].address + 3 * MIB
    assert allocator.largest_free() == 13 * MIB


def test_a_large_block_is_cut_only_where_more_than_1_mib_is_left() -> None:
    """11 MiB take a segment of 12 MiB whole, as 1 MiB would be left; 512 bytes less, and it is cut."""
    allocator = CachingAllocator()
    block = given_out(allocator, 11 * MIB)
    assert block.size == 12 * MIB
    free(allocator, block)
    assert given_out(allocator, 11 * MIB - 512).size == 11 * MIB - 512
    assert allocator.largest_free() == MIB + 512
    assert allocator.reserved == 12 * MIB


def test_freed_blocks_join_their_neighbours() -> None:
    """The three thirds of 15 MiB become one block of 20 MiB again, whichever is freed last."""
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        allocator = CachingAllocator()
        blocks = [given_out(allocator, 5 * MIB) for _ in range(3)]
        for place in order:
            free(allocator, blocks[place])
            check(allocator)
        assert allocator.largest_free() == 20 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    """With holes of 8 and 4 MiB, 3 MiB go into that of 4."""
    allocator = CachingAllocator()
    first, _, second, _ = [given_out(allocator, size * MIB) for size in (8, 2, 4, 2)]
    free(allocator, first)
    free(allocator, second)
    assert given_out(allocator, 3 * MIB).address == second.address


def test_a_pending_block_is_not_given_out() -> None:
    """Memory that another stream may still use is reserved and not free."""
    allocator = CachingAllocator()
    block = given_out(allocator, 12 * MIB)
    allocator.request_free(block)
    assert given_out(allocator, 12 * MIB).address != block.address
    allocator.complete_free(block)
    assert given_out(allocator, 12 * MIB).address == block.address


def test_streams_and_private_pools_share_nothing() -> None:
    """What is free on one stream or in one pool does not serve another."""
    allocator = CachingAllocator()
    for stream, owner in ((0, 0), (7, 0), (0, 1)):
        free(allocator, given_out(allocator, 12 * MIB, stream, owner))
    assert allocator.reserved == 36 * MIB
    allocator.release_cached()
    assert allocator.reserved == 12 * MIB  # a private pool keeps its segments: a captured graph may run again


def test_a_full_device_gives_back_what_is_cached_and_tries_again() -> None:
    """With room for 40 MiB, 24 MiB cached make way for 30; with 24 in use there is no way."""
    allocator = CachingAllocator(Settings(capacity_bytes=40 * MIB))
    block = given_out(allocator, 24 * MIB)
    assert allocator.allocate(30 * MIB) is None
    assert actions(allocator)[-1] == ("oom", 30 * MIB)
    free(allocator, block)
    given_out(allocator, 30 * MIB)
    assert actions(allocator)[-2:] == [("segment_free", 24 * MIB), ("segment_alloc", 30 * MIB)]
    assert allocator.retries == 2
    assert allocator.reserved == 30 * MIB


def test_a_process_may_be_limited_below_the_device() -> None:
    """With a limit of 30 MiB, 20 and then 12 do not fit on a device of 40; once the 20 are free, they make way."""
    allocator = CachingAllocator(Settings(limit_bytes=30 * MIB, capacity_bytes=40 * MIB))
    block = given_out(allocator, 20 * MIB)
    assert allocator.allocate(12 * MIB) is None
    free(allocator, block)
    given_out(allocator, 24 * MIB)
    assert allocator.reserved == 24 * MIB


def test_oversized_blocks_are_not_split() -> None:
    """With max_split_size 30 MiB, a free block of 64 MiB serves neither 16 MiB nor 40 MiB, but 50 MiB, whole."""
    allocator = CachingAllocator(Settings(max_split_size_bytes=30 * MIB))
    block = given_out(allocator, 64 * MIB)
    free(allocator, block)
    assert given_out(allocator, 16 * MIB).address != block.address
    assert given_out(allocator, 40 * MIB).address != block.address
    whole = given_out(allocator, 50 * MIB)
    assert (whole.address, whole.size) == (block.address, 64 * MIB)


def test_oversized_blocks_go_first_when_the_device_is_full() -> None:
    """With max_split_size set, one cached block that is large enough is released, and the rest stays cached."""
    allocator = CachingAllocator(Settings(max_split_size_bytes=30 * MIB, capacity_bytes=120 * MIB))
    large, small = given_out(allocator, 80 * MIB), given_out(allocator, 20 * MIB)
    free(allocator, large)
    free(allocator, small)
    given_out(allocator, 40 * MIB)
    assert actions(allocator)[-2:] == [("segment_free", 80 * MIB), ("segment_alloc", 40 * MIB)]
    assert allocator.retries == 0
    assert allocator.reserved == 60 * MIB


def test_garbage_collection_gives_back_the_oldest_and_needs_a_limit() -> None:
    """With 54 of 100 MiB reserved and a threshold of half, the longest free of two segments goes, and not the other.

    Without a limit for the process the threshold does nothing.
    """
    for limit, reserved in ((100 * MIB, 24 + 34), (None, 30 + 24 + 34)):
        allocator = CachingAllocator(Settings(garbage_collection_threshold=0.5, limit_bytes=limit))
        old, young = given_out(allocator, 30 * MIB), given_out(allocator, 24 * MIB)
        free(allocator, old)
        for _ in range(3):
            free(allocator, young)
            young = given_out(allocator, 24 * MIB)
        free(allocator, young)
        given_out(allocator, 34 * MIB)
        assert allocator.reserved == reserved * MIB


def test_expandable_segments_grow_by_pages() -> None:
    """Requests of 30 and 50 MiB map 40 and 40 MiB of one range; once free, the 80 MiB serve a single request."""
    allocator = CachingAllocator(Settings(expandable_segments=True))
    first = given_out(allocator, 30 * MIB)
    second = given_out(allocator, 50 * MIB)
    assert actions(allocator) == [("segment_map", 40 * MIB), ("segment_map", 40 * MIB)]
    assert second.address == first.address + 30 * MIB
    free(allocator, first)
    free(allocator, second)
    assert given_out(allocator, 80 * MIB).address == first.address
    assert allocator.reserved == 80 * MIB


def test_expandable_segments_grow_by_the_request_and_not_by_a_segments_size() -> None:
    """Behind 29.5 MiB of 40, 30.5 more take one page of 20: a segment of their own would be 32 and take two.

    c10/cuda/CUDACachingAllocator.cpp, alloc_block: try_allocate_expandable_block takes p.size(), not p.alloc_size.
    """
    allocator = CachingAllocator(Settings(expandable_segments=True))
    first, second = given_out(allocator, 59 * MIB // 2), given_out(allocator, 61 * MIB // 2)
    assert (second.address, allocator.reserved) == (first.address + first.size, 60 * MIB)


def test_one_request_may_be_larger_than_the_assumed_device() -> None:
    """100 GiB in one storage are a range of that size, or a failure where the device is known to be smaller."""
    size = 100 << 30
    assert given_out(CachingAllocator(Settings(expandable_segments=True)), size).size == size
    assert CachingAllocator(Settings(expandable_segments=True, capacity_bytes=40 << 30)).allocate(size) is None


def test_expandable_segments_give_back_whole_pages() -> None:
    """Of 40 free MiB behind 30 in use, the page they share stays; what was unmapped is mapped again first."""
    allocator = CachingAllocator(Settings(expandable_segments=True))
    given_out(allocator, 30 * MIB)
    behind = given_out(allocator, 40 * MIB)
    address = behind.address
    free(allocator, behind)
    allocator.release_cached()
    check(allocator)
    assert actions(allocator)[-1] == ("segment_unmap", 40 * MIB)
    assert allocator.reserved == 40 * MIB
    assert given_out(allocator, 40 * MIB).address == address


def test_ties_go_by_address_by_block_or_by_segment() -> None:
    """Two equal segments, the second at the lower address: each order takes the one it says."""
    places = {"address": 1, "block": 0, "segment": 0}
    for tie_break in TIE_BREAKS:
        addresses = iter((200 * MIB, 100 * MIB))
        allocator = CachingAllocator(None, tie_break, lambda size, stream, addresses=addresses: next(addresses))
        blocks = [given_out(allocator, 12 * MIB) for _ in range(2)]
        for block in blocks:
            free(allocator, block)
        assert given_out(allocator, 12 * MIB) is blocks[places[tie_break]]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["small", "large", "huge", "free", "pend", "complete", "empty"]),
        st.integers(1, 1 << 20),
        st.integers(0, 1),
    ),
    max_size=60,
)
SETTINGS = st.builds(
    Settings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, 24 * MIB, 64 * MIB]),
    divisions=st.sampled_from([(0,) * 16, (4,) * 16]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.5]),
    limit_bytes=st.sampled_from([None, 200 * MIB]),
    capacity_bytes=st.sampled_from([None, 300 * MIB]),
)


@settings(max_examples=80, deadline=None)
@given(EVENTS, st.sampled_from(TIE_BREAKS))
def test_the_block_given_is_the_one_a_plain_search_finds(
    events: list[tuple[str, int, int]], tie_break: TieBreak
) -> None:
    """Of the free blocks of the stream and size class, the smallest that fits, and of equals the first in its order."""
    orders: dict[TieBreak, Callable[[Block], int]] = {
        "address": lambda block: block.address,
        "block": lambda block: block.counter,
        "segment": lambda block: block.segment.counter << 64 | block.address,
    }
    descending = iter(range(1 << 45, 0, -(1 << 30)))  # the driver gives ever lower addresses
    allocator = CachingAllocator(None, tie_break, lambda size, stream: next(descending))
    alive: list[Block] = []
    for what, size, stream in events:
        if what in ("small", "large", "huge"):
            asked = size * {"small": 1, "large": 9, "huge": 60}[what]
            rounded = rounded_request(asked)
            fitting = [
                block
                for segment in allocator.segments.values()
                for block in segment.blocks()
                if block.state == FREE and block.size >= rounded
                if segment.pool.is_small is (rounded <= MIB) and segment.pool.stream == stream
            ]
            expected = min(fitting, key=lambda block: (block.size, orders[tie_break](block)), default=None)
            address = None if expected is None else expected.address
            taken = len(allocator.log)
            alive.append(given_out(allocator, asked, stream))
            assert (len(allocator.log) > taken) is (expected is None)
            assert address is None or alive[-1].address == address
        elif alive:
            free(allocator, alive.pop(size % len(alive)))


@settings(max_examples=150, deadline=None)
@given(EVENTS, SETTINGS, st.sampled_from(TIE_BREAKS))
def test_blocks_always_tile_segments(events: list[tuple[str, int, int]], chosen: Settings, tie_break: TieBreak) -> None:
    """Whatever is asked: blocks tile their segments, free ones are known and joined, and the bounds hold."""
    allocator = CachingAllocator(chosen, tie_break)
    alive: list[Block] = []
    pending: list[Block] = []
    page = 20 * MIB if chosen.expandable_segments else 0  # what is mapped for a request within the limit may pass it
    for what, size, stream in events:
        if what in ("small", "large", "huge"):
            block = allocator.allocate(size * {"small": 1, "large": 9, "huge": 60}[what], stream)
            if block is not None:
                assert all(block is not other for other in alive + pending)
                assert block.size >= block.requested
                alive.append(block)
        elif what == "free" and alive:
            free(allocator, alive.pop(size % len(alive)))
        elif what == "pend" and alive:
            pending.append(alive.pop(size % len(alive)))
            allocator.request_free(pending[-1])
        elif what == "complete" and pending:
            allocator.complete_free(pending.pop(size % len(pending)))
        elif what == "empty":
            allocator.release_cached()
        check(allocator)
        assert chosen.capacity_bytes is None or allocator.reserved <= chosen.capacity_bytes
        assert chosen.limit_bytes is None or allocator.reserved <= chosen.limit_bytes + page
    spans = sorted((block.address, block.address + block.size) for block in alive + pending)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    for block in alive + pending:
        free(allocator, block)
    allocator.release_cached()
    check(allocator)
    assert allocator.reserved == 0 or chosen.expandable_segments
