"""Stragglers at collectives, and clocks of several machines."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.analysis.ranks.rank_clocks import align_clocks, match_collectives
from memprof.analysis.ranks.stragglers import Stragglers, find_stragglers
from memprof.trace.manifest import Manifest
from memprof.trace.schema import RankCollectives, Ranks
from memprof.trace.store import Trace

REDUCE = "c10d.allreduce_.default"


def collectives(
    starts: list[list[float]], overs: list[list[float]] | None = None, name: str = REDUCE
) -> RankCollectives:
    """Collectives of one step; a list for each rank."""
    rows = [(rank, place, start) for rank, row in enumerate(starts) for place, start in enumerate(row)]
    ends = [math.nan] * len(rows) if overs is None else [over for row in overs for over in row]
    return RankCollectives.of(
        rank=[rank for rank, _, _ in rows],
        step=[0] * len(rows),
        place=[place for _, place, _ in rows],
        name=[name] * len(rows),
        phase=["backward"] * len(rows),
        read_bytes=[place for _, place, _ in rows],
        start_us=[start for _, _, start in rows],
        over_us=ends,
    )


def ranks(clocks: list[str]) -> Ranks:
    return Ranks.of(rank=list(range(len(clocks))), clock=clocks)


def found_of(clocks: list[str], told: RankCollectives) -> Stragglers:
    """Looks for stragglers in summaries made by hand."""
    manifests = [(Manifest(rank=rank, world_size=len(clocks)), {}) for rank in range(len(clocks))]
    trace = Trace.of(manifests, "run.memprof")
    tables = {Ranks: ranks(clocks), RankCollectives: told}
    return find_stragglers(Trace(trace.path, trace._processes, 0, lambda: tables))


def test_the_last_to_come_is_the_straggler() -> None:
    """Of three ranks rank 2 comes 8 and 5 us behind the one in the middle, rank 0 waits 10 and 6."""
    found = found_of(["a"] * 3, collectives([[0, 100], [2, 101], [10, 106]]))
    worst = found.ranks[0]
    assert (worst.rank, worst.times_last, worst.collectives) == (2, 2, 2)
    assert (worst.kept_waiting_us, worst.waited_us) == (13, 0)
    assert [(one.rank, one.waited_us) for one in found.ranks[1:]] == [(0, 16), (1, 13)]
    assert [(one.place, one.last_rank, one.behind_us, one.spread_us) for one in found.collectives] == [
        (0, 2, 8, 10),
        (1, 2, 5, 6),
    ]
    assert found.describe_clocks() == ""


def test_of_two_ranks_the_earlier_one_waits() -> None:
    """With two ranks all of the difference is waited for."""
    found = found_of(["a", "a"], collectives([[0], [10]]))
    assert [(one.rank, one.kept_waiting_us) for one in found.ranks] == [(1, 10), (0, 0)]


def test_equal_arrivals_make_no_straggler() -> None:
    """If all arrive at once, no rank is last."""
    assert [one.times_last for one in found_of(["a", "a"], collectives([[5], [5]])).ranks] == [0, 0]


def test_other_collectives_are_not_matched() -> None:
    """A rank with other collectives in a step, such as another stage of a pipeline, is not waited for."""
    told = collectives([[0.0, 100.0], [1.0, 101.0], [900.0]])
    assert [group.ranks.tolist() for group in match_collectives(told)] == [[0, 1]]
    assert {one.rank for one in found_of(["a"] * 3, told).ranks} == {0, 1}


def test_a_broadcast_waits_for_nobody() -> None:
    """Its root may be done before others begin, so a late rank delays nobody."""
    assert found_of(["a", "a"], collectives([[0], [900]], name="c10d.broadcast_.default")).ranks == ()


def test_two_clocks_are_aligned_by_what_was_over_after_all_had_come() -> None:
    """Clock b is 1,000 ahead. Both come at 0 and leave by 10 or 12: b's times lie between 988 and 1,010 too late."""
    told = collectives([[0.0], [1000.0]], [[10.0], [1012.0]])
    aligned = align_clocks(ranks(["a", "b"]), match_collectives(told))
    assert aligned.clocks == 2
    assert aligned.offset_us == {0: 0.0, 1: -1001.0}
    assert aligned.error_us == {0: 0.0, 1: 11.0}


def test_ranks_of_one_clock_need_no_alignment() -> None:
    """Ranks of one machine are compared as they are, without error."""
    aligned = align_clocks(ranks(["a", "a"]), match_collectives(collectives([[0.0], [7.0]], [[9.0], [9.0]])))
    assert (aligned.offset_us, aligned.worst_error_us) == ({0: 0.0, 1: 0.0}, 0.0)


def test_clocks_that_nothing_bounds_are_told() -> None:
    """Without a known end of a collective, clocks are used uncorrected, and the page says so."""
    found = found_of(["a", "b"], collectives([[0.0], [7.0]]))
    assert found.alignment.offset_us == {0: 0.0, 1: 0.0}
    assert math.isinf(found.alignment.worst_error_us)
    assert "no collective bounds their offsets" in found.describe_clocks()


def test_ranks_without_a_clock_have_one_of_their_own() -> None:
    """A recording without a clock, such as an older one, is aligned like another machine's."""
    assert align_clocks(ranks(["", ""]), ()).clocks == 2


@given(
    offset=st.floats(-1e6, 1e6),
    arrivals=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0.5, 20)), min_size=1, max_size=12),
)
def test_the_true_offset_lies_within_the_error(offset: float, arrivals: list[tuple[float, float, float]]) -> None:
    """However ranks come and go, as long as none leaves before all have come, the estimate holds its error."""
    begin = 1000.0 * np.arange(len(arrivals))
    ones, others = (begin + [one[side] for one in arrivals] for side in (0, 1))
    over = np.maximum(ones, others) + [one[2] for one in arrivals]
    told = collectives([ones.tolist(), (others + offset).tolist()], [over.tolist(), (over + 0.25 + offset).tolist()])
    aligned = align_clocks(ranks(["a", "b"]), match_collectives(told))
    assert abs(aligned.offset_us[1] + offset) <= aligned.error_us[1] + 1e-6


@pytest.mark.parametrize("name", ["_c10d_functional.reduce_scatter_tensor.default", "c10d._allgather_base_.default"])
def test_sharded_collectives_count(name: str) -> None:
    """Those of sharded training need every rank, whatever library calls them."""
    assert found_of(["a", "a"], collectives([[0], [10]], name=name)).ranks[0].rank == 1
