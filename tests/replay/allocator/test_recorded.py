"""The model against real allocators: the same segments, the same addresses, the same final blocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.replay.allocator.blocks import ALLOCATED, PENDING, UNMAPPED
from memprof.replay.allocator.blocks import FREE as FREE_BLOCK
from memprof.replay.allocator.events import ALLOCATE, FREE, Requests, replay
from memprof.replay.allocator.recorded_requests import block_sizes
from memprof.replay.allocator.rules import TIE_BREAKS, Settings
from memprof.replay.allocator.window import BlockMap, Range, rewound
from memprof.trace.schema import AllocatorEvents
from tests.replay.allocator.recorded import compare
from tests.replay.allocator.snapshots import cut_beginning, read_devices, snapshot_paths

MIB = 1 << 20
PATHS = snapshot_paths()


@pytest.mark.skipif(not PATHS, reason="the folder of real snapshots is not there")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.split("__")[0])
def test_real_snapshots_are_replayed_exactly(path: Path) -> None:
    """Every segment, every address and the final map of a snapshot come out of the model as they were recorded."""
    for device in read_devices(path):
        compared = compare(device.events, device.end, device.settings)
        assert compared.mismatches == []
        assert compared.allocations == np.count_nonzero(device.events.action == "alloc")
        assert compared.blocks == len(device.end.address)


@pytest.mark.skipif(not PATHS, reason="the folder of real snapshots is not there")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.split("__")[0])
def test_real_snapshots_are_replayed_from_any_moment(path: Path) -> None:
    """Cut off its beginning, and what follows is the same: the state before it is rebuilt from the end."""
    for device in read_devices(path):
        for share in (0.25, 0.5, 0.75):
            rest = cut_beginning(device.events, share)
            assert compare(rest, device.end, device.settings, "address").mismatches == []


@pytest.mark.skipif(not PATHS, reason="the folder of real snapshots is not there")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.split("__")[0])
def test_block_sizes_of_real_snapshots_are_those_of_their_final_blocks(path: Path) -> None:
    """What is alive at the end has the size it has there, and no allocation lies where no free block is known."""
    for device in read_devices(path):
        found = block_sizes(device.events, device.end, device.settings)
        at_end = dict(zip(device.end.address.tolist(), device.end.size.tolist(), strict=True))
        alive: dict[int, int] = {}
        for row, action in enumerate(device.events.action.tolist()):
            if action == "alloc":
                alive[int(device.events.address[row])] = int(found[row])
            elif action == "free_requested":
                alive.pop(int(device.events.address[row]), None)
        assert {address: at_end[address] for address in alive} == alive
        assert (found[device.events.action == "alloc"] > 0).all()


def test_a_tail_that_was_not_split_off_belongs_to_the_block_before_it() -> None:
    """19.5 MiB before the window leave a tail of 0.5; what is allocated behind it shows where the block ends."""
    half = MIB // 2
    happened = events(("alloc", 20 * MIB, MIB), ("free", 20 * MIB, MIB), ("free", 0, 39 * half))
    start = rewound(happened, blocks([Range(0, 40 * MIB)]), Settings())
    assert list(start.blocks_of(start.ranges[0], 40 * MIB)) == [
        (0, 20 * MIB, 39 * half, ALLOCATED),
        (20 * MIB, 20 * MIB, 0, FREE_BLOCK),
    ]


@pytest.mark.skipif(not PATHS, reason="the folder of real snapshots is not there")
def test_another_order_of_equal_blocks_is_noticed() -> None:
    """A recording by address is not matched by the order of block records: the order follows from the events."""
    (path,) = (path for path in PATHS if "silmont2000" in path.name)
    (device,) = read_devices(path)
    assert compare(device.events, device.end, device.settings, "address").mismatches == []
    assert len(compare(device.events, device.end, device.settings, "block").mismatches) == 5
    assert compare(device.events, device.end, device.settings).fitting == ("address",)


def test_where_events_cannot_tell_the_order_every_one_that_fits_is_named() -> None:
    """A single allocation fits all three orders."""
    happened = events(("segment_alloc", 0, 12 * MIB), ("alloc", 0, 12 * MIB))
    end = blocks([Range(0, 12 * MIB)], (0, 12 * MIB, 12 * MIB, ALLOCATED))
    assert compare(happened, end).fitting == TIE_BREAKS


def events(*rows: tuple[str, int, int]) -> AllocatorEvents:
    return AllocatorEvents.of(
        action=[row[0] for row in rows], address=[row[1] for row in rows], size_bytes=[row[2] for row in rows]
    )


def blocks(ranges: list[Range], *rows: tuple[int, int, int, int]) -> BlockMap:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return BlockMap(ranges, columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])


def test_the_state_before_the_window_is_rebuilt() -> None:
    """Undone: an allocation in the window, a free of a block from before it, and a segment taken in it."""
    old, new = Range(0, 20 * MIB), Range(64 * MIB, 30 * MIB)
    happened = events(
        ("free_requested", 4 * MIB, 2 * MIB),
        ("free_completed", 4 * MIB, 2 * MIB),
        ("segment_alloc", 64 * MIB, 30 * MIB),
        ("alloc", 64 * MIB, 30 * MIB),
    )
    end = blocks(
        [old, new],
        (0, 4 * MIB, 4 * MIB, ALLOCATED),
        (4 * MIB, 16 * MIB, 2 * MIB, FREE_BLOCK),
        (64 * MIB, 30 * MIB, 30 * MIB, ALLOCATED),
    )
    start = rewound(happened, end, Settings())
    assert start.ranges == [old]
    assert start.address.tolist() == [0, 4 * MIB]
    assert start.size.tolist() == [4 * MIB, 2 * MIB]
    assert start.state.tolist() == [ALLOCATED, ALLOCATED]
    compared = compare(happened, end)
    assert compared.mismatches == []
    assert not compared.is_complete


def test_a_block_that_was_never_cut_gets_its_true_size_back() -> None:
    """11 MiB in a segment of 12 MiB: the last MiB was not split off, so it belongs to the block before the window."""
    happened = events(("free_requested", 0, 11 * MIB), ("free_completed", 0, 11 * MIB))
    end = blocks([Range(0, 12 * MIB)], (0, 12 * MIB, 11 * MIB, FREE_BLOCK))
    assert rewound(happened, end, Settings()).size.tolist() == [12 * MIB]
    assert compare(happened, end).mismatches == []


def test_a_pending_block_at_the_end_is_one_in_the_model() -> None:
    """A free that was requested and not completed leaves its block pending."""
    happened = events(("segment_alloc", 0, 12 * MIB), ("alloc", 0, 12 * MIB), ("free_requested", 0, 12 * MIB))
    end = blocks([Range(0, 12 * MIB)], (0, 12 * MIB, 12 * MIB, PENDING))
    assert compare(happened, end).mismatches == []


def test_segments_given_back_by_empty_cache_are_followed() -> None:
    """A run of segment_free events is what the model gives back itself."""
    happened = events(
        ("segment_alloc", 0, 12 * MIB),
        ("alloc", 0, 12 * MIB),
        ("free_requested", 0, 12 * MIB),
        ("free_completed", 0, 12 * MIB),
        ("segment_free", 0, 12 * MIB),
    )
    assert compare(happened, blocks([])).mismatches == []


@pytest.mark.parametrize(
    ("row", "column", "value", "sentence"),
    [
        (1, "address", 4 * MIB, "put at 0x400000, by the model at 0x0"),
        (0, "size_bytes", 14 * MIB, "recorded segment_alloc of 14680064"),
        (2, "address", 8 * MIB, "are freed, which the model has not allocated"),
    ],
)
def test_a_recording_that_differs_is_described(row: int, column: str, value: int, sentence: str) -> None:
    """Each difference is named with what was recorded and what the model did."""
    happened = events(
        ("segment_alloc", 0, 12 * MIB),
        ("alloc", 0, 12 * MIB),
        ("free_requested", 0, 12 * MIB),
        ("free_completed", 0, 12 * MIB),
    )
    changed = getattr(happened, column).copy()
    changed[row] = value
    happened = dataclasses.replace(happened, **{column: changed})
    texts = [
        one.what for one in compare(happened, blocks([Range(0, 12 * MIB)], (0, 12 * MIB, 0, FREE_BLOCK))).mismatches
    ]
    assert any(sentence in text for text in texts), texts


def record(lives: list[tuple[int, int]], chosen: Settings) -> tuple[list[tuple[str, int, int]], BlockMap]:
    """Uses the model as the real allocator: every event it would record, and the blocks after the last."""
    moments = [(2 * place, ALLOCATE, place) for place in range(len(lives))]
    moments += [(2 * (place + life) + 1, FREE, place) for place, (_, life) in enumerate(lives) if life < 20]
    moments.sort()
    sizes = [size for size, _ in lives]
    asked = Requests.of(
        np.array([kind for _, kind, _ in moments]), np.array([about for *_, about in moments]), np.array(sizes)
    )
    done = replay(asked, chosen)
    log: dict[int, list[tuple[str, int, int]]] = {}
    for one in done.segment_events:
        log.setdefault(one.event, []).append((one.action, one.address, one.size))
    rows = []
    for event, (_, kind, about) in enumerate(moments):
        rows += log.get(event, [])
        address = int(done.address[about])
        names = ["alloc"] if kind == ALLOCATE else ["free_requested", "free_completed"]
        rows += [(name, address, sizes[about]) for name in names]
    ranges, held = [], []
    for segment in done.allocator.segments.values():
        mapped = [block for block in segment.blocks() if block.state != UNMAPPED]
        held += [(block.address, block.size, block.requested, block.state) for block in mapped]
        ranges.append(
            Range(
                segment.address,
                sum(block.size for block in mapped),
                is_small=segment.pool.is_small,
                is_expandable=segment.is_expandable,
            )
        )
    return rows, blocks(ranges, *sorted(held))


LIVES = st.lists(
    st.tuples(st.one_of(st.integers(1, MIB), st.integers(MIB, 30 * MIB)), st.integers(1, 25)), min_size=1, max_size=50
)


@settings(max_examples=100, deadline=None)
@given(LIVES, st.booleans(), st.integers(0, 200))
def test_any_window_of_a_recording_is_followed(lives: list[tuple[int, int]], is_expandable: bool, first: int) -> None:
    """From wherever a recording begins, what follows is the same: addresses, segments and the final blocks."""
    chosen = Settings(expandable_segments=is_expandable)
    rows, end = record(lives, chosen)
    # A window never begins between a segment and the allocation it was taken for.
    while 0 < first < len(rows) and rows[first - 1][0] in ("segment_alloc", "segment_map"):
        first += 1
    compared = compare(events(*rows[first:]), end, chosen, "address")
    told = [one.what for one in compared.mismatches if "at the end" not in one.what]
    assert told == []
    if first == 0:
        assert compared.mismatches == []
        assert compared.is_complete
