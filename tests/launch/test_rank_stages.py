"""Which stages of a pipeline are run where they differ only in how many micro-batches they store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memprof.launch.dry.rank_roles import Grid, Roles, find_roles, share_between
from memprof.trace.files.rank_roles import RankRole, StageSurvey
from memprof.virtual.ranks.role import most_stored

_RANKS = 16


def _decide(
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
    roles, run, asked = _decide(_falling)
    assert run == {0, 1, 8, 14, 15}
    assert asked == set(range(1, 15))
    assert roles.between[1] == {"ranks": [2, 3, 4, 5, 6, 7], "other": 8, "shares": [share / 7 for share in range(1, 7)]}
    assert roles.between[8]["ranks"] == [9, 10, 11, 12, 13]


def test_replicas_of_stages_are_placed_with_them() -> None:
    """16 stages of two replicas: of those that are alike, both replicas of three are run, or found to be the same."""
    roles, run, _ = _decide(_falling, replicas=2)
    assert {rank // 2 for rank in run} == {0, 1, 8, 14, 15}
    placed = {rank for held in roles.between.values() for rank in held["ranks"]}
    same = {rank for ranks in roles.same.values() for rank in ranks}
    assert placed | same == set(range(32))
    assert not placed & same


def test_a_stage_that_differs_is_run() -> None:
    """Stage 6 has a layer more: it is no part of a stretch, and neither are the others on both sides one."""
    roles, run, _ = _decide(lambda rank: StageSurvey(9, _RANKS - rank) if rank == 6 else _falling(rank))
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
    roles, run, _ = _decide(survey_of, total_of)
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
