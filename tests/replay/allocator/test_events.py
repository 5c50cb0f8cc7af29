"""Replays of columns: what they return is what walking the events one by one gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.replay.allocator.events import (
    ALLOCATE,
    EMPTY_CACHE,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    Requests,
    replay,
)
from memprof.replay.allocator.fragmentation import describe
from memprof.replay.allocator.rules import Settings
from memprof.trace.schema import NONE

MIB = 1 << 20


def requests(events: list[tuple[int, int]], sizes: list[int]) -> Requests:
    return Requests.of(
        np.array([kind for kind, _ in events]), np.array([about for _, about in events]), np.array(sizes)
    )


def test_curves_of_a_few_events() -> None:
    """Reserved and given out after each event: a pending block is reserved and given out no more."""
    done = replay(
        requests(
            [(ALLOCATE, 0), (ALLOCATE, 1), (FREE_REQUESTED, 0), (FREE_COMPLETED, 0), (EMPTY_CACHE, NONE), (FREE, 1)],
            [12 * MIB, 3 * MIB],
        )
    )
    assert done.reserved().tolist() == [12 * MIB, 32 * MIB, 32 * MIB, 32 * MIB, 20 * MIB, 20 * MIB]
    assert done.allocated().tolist() == [12 * MIB, 15 * MIB, 3 * MIB, 3 * MIB, 3 * MIB, 0]
    assert [(event.event, event.action) for event in done.segment_events] == [
        (0, "segment_alloc"),
        (1, "segment_alloc"),
        (4, "segment_free"),
    ]
    assert not done.failed().any()


def test_what_does_not_fit_is_left_out() -> None:
    """An allocation beyond the device's capacity fails, its free does nothing, and the rest goes on."""
    done = replay(
        requests([(ALLOCATE, 0), (ALLOCATE, 1), (FREE, 0), (ALLOCATE, 2)], [50 * MIB, 8 * MIB, 4 * MIB]),
        Settings(capacity_bytes=30 * MIB),
    )
    assert done.failed().tolist() == [True, False, False]
    assert done.address[0] == NONE
    assert done.allocated().tolist() == [0, 8 * MIB, 8 * MIB, 12 * MIB]


def test_a_replay_can_stop_at_any_moment() -> None:
    """Used and free memory is that of the moment after an event."""
    asked = requests([(ALLOCATE, 0), (ALLOCATE, 1), (FREE, 0), (ALLOCATE, 2)], [8 * MIB, 4 * MIB, 30 * MIB])
    held = describe(replay(asked, until=3).allocator)
    assert (held.reserved, held.allocated, held.requested) == (20 * MIB, 4 * MIB, 4 * MIB)
    assert (held.largest_free, held.idle_bytes, held.pinned_bytes) == (8 * MIB, 0, 16 * MIB)
    assert held.segments[0].pins == (1,)


LIVES = st.lists(st.tuples(st.integers(1, 40 * MIB), st.integers(1, 30)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(LIVES, st.sampled_from([Settings(), Settings(expandable_segments=True), Settings(capacity_bytes=200 * MIB)]))
def test_columns_agree_with_walking(lives: list[tuple[int, int]], chosen: Settings) -> None:
    """The curves equal what the allocator holds when it is stopped after each event."""
    moments = [(2 * place, ALLOCATE, place) for place in range(len(lives))]
    moments += [(2 * (place + life) + 1, FREE, place) for place, (_, life) in enumerate(lives)]
    asked = requests([(kind, about) for _, kind, about in sorted(moments)], [size for size, _ in lives])
    done = replay(asked, chosen)
    reserved, allocated = done.reserved(), done.allocated()
    for event in range(0, len(asked), 7):
        held = describe(replay(asked, chosen, until=event + 1).allocator)
        assert (held.reserved, held.allocated) == (reserved[event], allocated[event])
    assert allocated[-1] == 0
