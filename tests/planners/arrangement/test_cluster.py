"""What collectives cost: the formulas of the lectures, and links inside and between nodes."""

from __future__ import annotations

import math

import pytest

from memprof.planners.arrangement.arrangement import Cluster, Group

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
