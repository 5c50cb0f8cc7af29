"""What collectives cost, and schedules of pipeline stages."""

from __future__ import annotations

import itertools
import math

import pytest

from memprof.planners.arrangement.arrangement import CHUNKS, SCHEDULES, Cluster, Group
from memprof.planners.arrangement.pipeline import fullest_moments, rank_order, simulate

SIZE, SPEED = 1e9, 100e3


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_rings_send_what_the_lectures_say(ranks: int) -> None:
    group = Group(ranks, SPEED, 0.0)
    part = (ranks - 1) / ranks * SIZE / SPEED
    assert group.all_gather_us(SIZE) == pytest.approx(part)
    assert group.reduce_scatter_us(SIZE) == pytest.approx(part)
    assert group.all_to_all_us(SIZE) == pytest.approx(part)
    assert group.all_reduce_us(SIZE) == pytest.approx(2 * part)


def test_small_data_goes_over_trees() -> None:
    group = Group(1024, SPEED, 5.0)
    assert group.all_reduce_us(8) == pytest.approx(2 * math.log2(1024) * 5.0 + 2 * 8 / SPEED)
    ring = 2 * 1023 * 5.0 + 2 * 1023 / 1024 * 1e12 / SPEED
    assert group.all_reduce_us(1e12) == pytest.approx(min(ring, 2 * 10 * 5.0 + 2 * 1e12 / SPEED))


def test_one_rank_sends_nothing() -> None:
    group = Group(1, SPEED, 5.0)
    assert group.all_reduce_us(SIZE) == group.all_gather_us(SIZE) == group.send_us(SIZE) == 0


@pytest.mark.parametrize(
    ("ranks", "stride", "speed"),
    [
        (8, 1, 450e3),  # one node
        (2, 4, 450e3),
        (2, 8, 50e3),  # the same device of two nodes
        (16, 1, 400e3),  # whole nodes: every device has a link of its own
        (4, 4, 100e3),
        (64, 8, 50e3),
    ],
)
def test_groups_that_span_nodes_share_their_links(ranks: int, stride: int, speed: float) -> None:
    assert Cluster(512, 8, 450e3, 50e3, 64e3).group(ranks, stride).bytes_per_us == speed


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
