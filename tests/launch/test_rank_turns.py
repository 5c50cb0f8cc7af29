"""Which of the ranks of a dry run run at a time."""

from __future__ import annotations

import pytest

from memprof.launch.dry.rank_runs import Turns, find_turns


@pytest.mark.parametrize(
    ("alive", "ended", "waiting", "wanted", "expected"),
    [
        pytest.param({0}, (), {}, (), Turns(frozenset({0})), id="rank 0 runs first, alone"),
        pytest.param({0}, (), {0: 1}, (), Turns(frozenset({0}), (1,)), id="a rank it waits for is started"),
        pytest.param(
            {0, 1, 2}, (), {0: 1, 1: 2}, (), Turns(frozenset({0, 1, 2})), id="the last of a chain runs, the others wait"
        ),
        pytest.param(
            {0, 1, 2, 3}, (), {}, (), Turns(frozenset({0, 1})), id="after the messages only two run, rank 0 among them"
        ),
        pytest.param({1, 2}, {0}, {}, (3, 2), Turns(frozenset({2}), (3,)), id="then those that are wanted, in order"),
        pytest.param(
            {1, 3},
            {0, 2},
            {3: 1},
            (3,),
            Turns(frozenset({1, 3})),
            id="one that is not wanted sends what another awaits",
        ),
        pytest.param({1}, {0, 2}, {}, (), Turns(frozenset(), is_done=True), id="one that is not wanted is left out"),
        pytest.param(
            {0, 1}, (), {0: 1, 1: 0}, (), Turns(frozenset({0, 1}), is_stuck=True), id="two wait for each other"
        ),
    ],
)
def test_who_runs(
    alive: set[int], ended: set[int], waiting: dict[int, int], wanted: tuple[int, ...], expected: Turns
) -> None:
    """On two processors."""
    assert find_turns(alive, ended, waiting, wanted, 2) == expected


@pytest.mark.parametrize(
    ("alive", "world_size", "starting"),
    [({0, 1, 2}, 8, (3,)), ({0, 1, 2}, 3, ()), ({0, 1}, 8, ())],
    ids=("the next is started in advance", "there is no next", "one wait is no line yet"),
)
def test_ranks_that_wait_in_a_line_start_the_next(alive: set[int], world_size: int, starting: tuple[int, ...]) -> None:
    """Each stage waits for the shapes of the next: while the last one begins, so does the one after it."""
    waiting = {rank: rank + 1 for rank in sorted(alive)[:-1]}
    assert find_turns(alive, (), waiting, (), 2, world_size).starting == starting
