"""Which ranks and stages of a job are dry-run, which others they represent, and which run at a time."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from memprof.launch.dry.rank_roles import Grid, Roles, find_roles, share_between
from memprof.launch.dry.rank_runs import Turns, find_turns, rank_environment
from memprof.launch.parent.target import CannotStartError, Target, check_ranks
from memprof.trace.files.rank_roles import RankRole, StageSurvey
from memprof.virtual.ranks.role import most_stored


def _decide(grid: Grid, role_of: Callable[[int], int], *, line: int = 0, most: int = 100) -> tuple[Roles, set[int]]:
    """Dry-runs ranks until all roles are known; with `line`, each rank exchanges tensors with those `line` away."""
    known: dict[int, RankRole] = {}
    ranks = len(grid.places)
    while True:
        roles = find_roles(grid, known, most)
        if not roles.wanted:
            return roles, set(known)
        for rank in roles.wanted:
            peers = [other for other in (rank - line, rank + line) if line and 0 <= other < ranks]
            known[rank] = RankRole(rank, ranks, [], peers, role_of(rank))


def _mesh(outer: int, inner: int) -> list[list[int]]:
    """Returns the groups of a mesh with two dimensions, the inner one first."""
    rows = [list(range(row * inner, (row + 1) * inner)) for row in range(outer)]
    return [*rows, *([row[place] for row in rows] for place in range(inner))]


@pytest.mark.parametrize("ranks", [2, 64, 1024])
def test_ranks_that_do_the_same_are_run_twice(ranks: int) -> None:
    """The first and the last are run; all others do what these do."""
    roles, run = _decide(Grid.of(ranks, []), lambda rank: 7)
    assert run == {0, ranks - 1}
    assert sorted(rank for ranks_alike in roles.same.values() for rank in ranks_alike) == list(range(ranks))


@pytest.mark.parametrize(("spread", "runs"), [(0, {0, 63}), (10**7, set(range(64)))])
def test_other_pieces_of_the_same_bytes_are_the_same_if_the_peaks_are(spread: int, runs: set[int]) -> None:
    """Each rank of a sharded optimizer holds other parts of parameters; those of the last end in a padding."""
    known: dict[int, RankRole] = {}
    while (roles := find_roles(Grid.of(64, []), known, 200)).wanted:
        for rank in roles.wanted:
            sums = {"aten.clone.default": 10**9 - (rank == 63) * 10**5}
            known[rank] = RankRole(rank, 64, [], [], rank, sums=sums, peak_bytes=10**9 + rank * spread)
    assert set(known) == runs


def test_operators_with_other_bytes_are_not_the_same() -> None:
    """A hundredth of the bytes moved from one operator to another, at the same peak."""
    one, other = (RankRole(0, 2, [], [], rank, sums={"a": 99 + rank, "b": 1 - rank}, peak_bytes=9) for rank in (0, 1))
    assert not one.does_as(other)
    assert one.does_as(RankRole(1, 2, [], [], 5, sums=one.sums, peak_bytes=9))


def test_the_last_shard_is_found_where_it_is_shorter() -> None:
    """65 rows over 64 ranks: 2 each for ranks 0 to 31, 1 for rank 32, none for the others."""
    rows = [max(0, min(2, 65 - 2 * rank)) for rank in range(64)]
    roles, run = _decide(Grid.of(64, []), lambda rank: rows[rank])
    assert all(rows[one] == rows[other] for one, others in roles.same.items() for other in others)
    assert sorted(rank for ranks_alike in roles.same.values() for rank in ranks_alike) == list(range(64))
    assert len(run) < 20


def test_a_rank_that_does_more_than_the_others_costs_two_runs() -> None:
    """Rank 0 logs: besides it and the last one, rank 1 is run, which is like the last."""
    roles, run = _decide(Grid.of(64, []), lambda rank: rank == 0)
    assert run == {0, 1, 63}
    assert roles.same[0] == [0]


@pytest.mark.parametrize("stage_axis", [0, 1])
def test_every_stage_of_a_pipeline_is_run_and_its_replicas_are_not(stage_axis: int) -> None:
    """8 stages of 4 replicas: two of each stage are run, in whichever dimension the stages are."""
    outer, inner = (8, 4) if stage_axis == 0 else (4, 8)
    grid = Grid.of(32, _mesh(outer, inner))
    assert sorted(grid.sizes) == [4, 8]
    stage = (lambda rank: rank // 4) if stage_axis == 0 else (lambda rank: rank % 8)
    roles, run = _decide(grid, stage, line=4 if stage_axis == 0 else 1)
    assert all(stage(one) == stage(other) for one, others in roles.same.items() for other in others)
    assert {stage(rank) for rank in run} == set(range(8))
    assert len(run) == 16


def test_groups_that_overlap_span_no_dimension_twice() -> None:
    """The groups of data and tensor ranks, and both flattened into one, make a grid of 4 x 2 x 2."""
    pairs = [[2 * place, 2 * place + 1] for place in range(8)]
    halves = [[rank, rank + 2] for rank in (0, 1, 4, 5, 8, 9, 12, 13)]
    fours = [[4 * place, 4 * place + 1, 4 * place + 2, 4 * place + 3] for place in range(4)]
    grid = Grid.of(16, [*fours, *pairs, *halves])
    assert sorted(grid.sizes) == [2, 2, 4]
    assert len(set(grid.places)) == 16


def test_no_more_ranks_are_run_than_allowed_and_the_rest_is_left_open() -> None:
    """All 64 ranks differ: 16 are run, half of what is allowed, and the others stay unknown.

    So it is if two of them happen to do the same; where eight do in each case, more are run, until all are known.
    """
    _, run = _decide(Grid.of(64, []), lambda rank: max(rank, 1), most=32)
    assert len(run) == 16
    roles, run = _decide(Grid.of(64, []), lambda rank: rank, most=32)
    assert len(run) == 16
    assert all(others == [one] for one, others in roles.same.items())
    roles, run = _decide(Grid.of(64, []), lambda rank: rank // 8, most=32)
    assert len(run) > 16
    assert sorted(rank for ranks_alike in roles.same.values() for rank in ranks_alike) == list(range(64))


def test_stages_are_run_at_equal_distances_where_there_are_more_than_allowed() -> None:
    """Of 64 stages 16 are run: the first, the last, and 14 of those between them."""
    _, run = _decide(Grid.of(64, []), lambda rank: rank, line=1, most=16)
    assert len(run) == 16
    places = sorted(run)
    assert (places[0], places[-1]) == (0, 63)
    assert max(right - left for left, right in itertools.pairwise(places)) <= 6


def test_variables_are_those_of_torchrun() -> None:
    """Rank 11 of 16 on 2 nodes is number 3 of the second."""
    variables = rank_environment(11, 16, 2)
    assert variables["RANK"] == "11"
    assert variables["LOCAL_RANK"] == "3"
    assert variables["GROUP_RANK"] == "1"
    assert variables["WORLD_SIZE"] == "16"
    assert variables["LOCAL_WORLD_SIZE"] == "8"


@pytest.mark.parametrize(
    ("target", "changes", "sentence"),
    [
        ("train.py", {"dry_run": False}, "add --dry-run"),
        ("train.py", {"ranks": 0, "nodes": 2}, "add --ranks 64"),
        ("train.py", {"ranks": 2048}, "exceeds the maximum of 1,024"),
        ("train.py", {"ranks": 10, "nodes": 4}, "10 ranks cannot be divided evenly among 4 nodes"),
        ("train.py", {"plan_ranks": 8}, "leave one out"),
        ("train.py", {"environment": {"WORLD_SIZE": "2"}}, "WORLD_SIZE is set"),
        ("", {}, "name the script in place of torchrun"),
    ],
)
def test_ranks_that_cannot_be_started_are_refused(target: str, changes: dict[str, Any], sentence: str) -> None:
    """One sentence, before anything is started."""
    job = Target((sys.executable, target), target) if target else Target(("torchrun", "train.py"), "train.py")
    options = {"ranks": 8, "nodes": 1, "plan_ranks": 1, "environment": {}, "dry_run": True, **changes}
    with pytest.raises(CannotStartError, match=sentence):
        check_ranks(job, **options)


_RANKS = 16


def _decide_stages(
    survey_of: Callable[[int], StageSurvey | None], total_of: Callable[[int], int] = lambda _: 1, replicas: int = 1
) -> tuple[Roles, set[int], set[int]]:
    """Dry-runs stages until all roles are known; returns these, the ranks that were run, and those surveyed first."""
    ranks = _RANKS * replicas
    groups = [list(range(first, ranks, replicas)) for first in range(replicas)] if replicas > 1 else []
    grid = Grid.of(ranks, groups)
    known: dict[int, RankRole] = {}
    surveys: dict[int, StageSurvey] = {}
    asked: set[int] = set()
    while True:
        roles = find_roles(grid, known, 100, surveys)
        if not roles.wanted and not roles.surveyed:
            return roles, set(known), asked
        asked |= set(roles.surveyed)
        for rank in (*roles.wanted, *roles.surveyed):
            stage = rank // replicas
            survey = survey_of(stage)
            surveys |= {} if survey is None else {rank: survey}
            if rank in roles.wanted:
                peers = [other for other in (rank - replicas, rank + replicas) if 0 <= other < ranks]
                known[rank] = RankRole(rank, ranks, groups, peers, stage, total=total_of(stage))


def _falling(rank: int) -> StageSurvey:
    """As under 1F1B: each stage stores one micro-batch less than the last; the first and the last have own layers."""
    return StageSurvey({0: 1, _RANKS - 1: 2}.get(rank, 3), _RANKS - rank)


def test_three_of_the_stages_that_are_alike_are_run() -> None:
    """Besides the first and the last, which differ; the others are placed between these by what they store."""
    roles, run, asked = _decide_stages(_falling)
    assert run == {0, 1, 8, 14, 15}
    assert asked == set(range(1, 15))
    assert roles.between[1] == {"ranks": [2, 3, 4, 5, 6, 7], "other": 8, "shares": [share / 7 for share in range(1, 7)]}
    assert roles.between[8]["ranks"] == [9, 10, 11, 12, 13]


def test_replicas_of_stages_are_placed_with_them() -> None:
    """16 stages of two replicas: of those that are alike, both replicas of three are run, or found to be the same."""
    roles, run, _ = _decide_stages(_falling, replicas=2)
    assert {rank // 2 for rank in run} == {0, 1, 8, 14, 15}
    placed = {rank for held in roles.between.values() for rank in held["ranks"]}
    same = {rank for ranks in roles.same.values() for rank in ranks}
    assert placed | same == set(range(32))
    assert not placed & same


def test_a_stage_that_differs_is_run() -> None:
    """Stage 6 has a layer more: it is no part of a stretch, and neither are the others on both sides one."""
    roles, run, _ = _decide_stages(lambda rank: StageSurvey(9, _RANKS - rank) if rank == 6 else _falling(rank))
    assert run == {0, 1, 3, 5, 6, 7, 11, 14, 15}
    assert {rank for held in roles.between.values() for rank in held["ranks"]} == {2, 4, 8, 9, 10, 12, 13}


def test_a_stage_that_was_run_in_advance_is_not_placed_between_others() -> None:
    """Where processors were idle, stage 3 had ended before it was known to be like the others."""
    surveys = {rank: _falling(rank) for rank in range(_RANKS)}
    known = {
        rank: RankRole(
            rank, _RANKS, [], [other for other in (rank - 1, rank + 1) if 0 <= other < _RANKS], rank, total=1
        )
        for rank in (0, 1, 3, 8, 14, 15)
    }
    roles = find_roles(Grid.of(_RANKS, []), known, 100, surveys)
    assert not roles.wanted
    assert roles.same[3] == [3]
    assert roles.between[1]["ranks"] == [2, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("survey_of", "total_of"),
    [
        pytest.param(_falling, lambda rank: rank, id="their whole runs differ in more than the order"),
        pytest.param(lambda rank: StageSurvey(_falling(rank).digest, rank % 3), lambda _: 1, id="no order of stages"),
        pytest.param(lambda _: None, lambda _: 1, id="a pipeline of the job's own"),
    ],
)
def test_otherwise_all_stages_are_run(
    survey_of: Callable[[int], StageSurvey | None], total_of: Callable[[int], int]
) -> None:
    """Whatever does not show that stages are alike."""
    roles, run, _ = _decide_stages(survey_of, total_of)
    assert run == set(range(_RANKS))
    assert not roles.between


def test_stages_that_store_equally_many_are_at_the_first() -> None:
    """No division by zero."""
    surveys = dict.fromkeys((1, 2, 3), StageSurvey(1, 4))
    assert share_between(2, 1, 3, surveys) == 0


@pytest.mark.parametrize(
    ("actions", "most"), [("FFFBFBBB", 3), ("FIWFIW", 1), ("FFIIWW", 2), ("", 0)], ids=("1f1b", "zero", "late", "none")
)
def test_stored_micro_batches_are_counted(actions: str, most: int) -> None:
    """A backward frees one, or the part of it that computes the gradient of the input."""
    assert most_stored(actions) == most


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
