"""Schedules of pipeline stages: bubbles, what stages hold, and that each round runs after what it needs."""

from __future__ import annotations

import itertools

import pytest

from memprof.planners.arrangement.arrangement import CHUNKS, SCHEDULES
from memprof.planners.arrangement.pipeline import fullest_moments, rank_order, simulate


@pytest.mark.parametrize(("ranks", "micro_batches"), list(itertools.product((2, 3, 4, 8), (1, 2, 4, 8, 24))))
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_bubble_of_equal_stages(schedule: str, ranks: int, micro_batches: int) -> None:
    timed = simulate(schedule, ranks, micro_batches, [1.0] * ranks, [2.0] * ranks, 0.0)
    assert timed.total_us == pytest.approx(3.0 * (micro_batches + ranks - 1))
    # The share of the whole time that a rank waits.
    assert 1 - max(timed.busy_us) / timed.total_us == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert timed.total_us / max(timed.busy_us) - 1 == pytest.approx((ranks - 1) / micro_batches)


@pytest.mark.parametrize(("ranks", "rounds"), list(itertools.product((2, 4, 8), (1, 2, 4))))
def test_interleaving_halves_the_bubble(ranks: int, rounds: int) -> None:
    timed = simulate("Interleaved1F1B", ranks, ranks * rounds, [1.0] * 2 * ranks, [2.0] * 2 * ranks, 0.0)
    assert timed.total_us / max(timed.busy_us) - 1 == pytest.approx((ranks - 1) / (2 * ranks * rounds))


@pytest.mark.parametrize(("ranks", "micro_batches"), list(itertools.product((2, 4, 8), (1, 2, 4, 16))))
def test_a_stage_of_1f1b_holds_as_many_as_there_are_stages_from_it_on(ranks: int, micro_batches: int) -> None:
    for rank in range(ranks):
        moments = fullest_moments("1F1B", ranks, rank, micro_batches, 1)
        assert max(sum(moment.held) for moment in moments) + 1 == min(micro_batches, ranks - rank)
        moments = fullest_moments("GPipe", ranks, rank, micro_batches, 1)
        assert max(sum(moment.held) for moment in moments) + 1 == micro_batches


@pytest.mark.parametrize(("ranks", "rounds"), list(itertools.product((2, 4), (1, 2, 6))))
def test_interleaved_stages_hold_what_megatron_says(ranks: int, rounds: int) -> None:
    for rank in range(ranks):
        moments = fullest_moments("Interleaved1F1B", ranks, rank, ranks * rounds, 2)
        ahead = min(2 * (ranks - rank - 1) + ranks, 2 * ranks * rounds)
        most = max(sum(moment.held) for moment in moments) + 1
        assert most == min(ahead + 1, 2 * ranks * rounds)


@pytest.mark.parametrize(("schedule", "ranks"), list(itertools.product(SCHEDULES, (2, 4))))
def test_many_micro_batches_hold_no_more_than_all_that_are_walked(schedule: str, ranks: int) -> None:
    """fullest_moments walks a few rounds only: here every round, by hand."""
    chunks, micro_batches = CHUNKS[schedule], 16 * ranks
    for rank in range(ranks):
        held, most = [0] * chunks, 0
        for work in rank_order(schedule, ranks, rank, micro_batches, chunks):
            held[work.chunk // ranks] += 1 if work.is_forward else -1
            most = max(most, sum(held))
        found = fullest_moments(schedule, ranks, rank, micro_batches, chunks)
        assert max(sum(moment.held) for moment in found) + 1 == most
        assert not any(held)


@pytest.mark.parametrize(("schedule", "ranks"), list(itertools.product(SCHEDULES, (2, 3, 4))))
def test_each_rank_does_everything_once(schedule: str, ranks: int) -> None:
    chunks, micro_batches = CHUNKS[schedule], 2 * ranks
    works = [work for rank in range(ranks) for work in rank_order(schedule, ranks, rank, micro_batches, chunks)]
    assert len(works) == len(set(works)) == 2 * ranks * chunks * micro_batches


def test_sending_delays_the_first_micro_batch() -> None:
    quick = simulate("1F1B", 4, 8, [1.0] * 4, [2.0] * 4, 0.0)
    slow = simulate("1F1B", 4, 8, [1.0] * 4, [2.0] * 4, 0.5)
    assert slow.total_us > quick.total_us + 3 * 2 * 0.5 - 1e-9


def test_the_slowest_stage_decides() -> None:
    timed = simulate("1F1B", 3, 60, [1.0, 4.0, 1.0], [1.0, 4.0, 1.0], 0.0)
    assert timed.busy_us == (120.0, 480.0, 120.0)
    assert timed.total_us == pytest.approx(480 + 1 + 1)
