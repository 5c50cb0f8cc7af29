"""Comparison of ranks: the worst, their spread, missing ones, stragglers at collectives, and clocks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.analysis.ranks.rank_clocks import align_clocks, match_collectives
from memprof.analysis.ranks.rank_report import compare_ranks, job_notes, name_numbers, read_curves
from memprof.analysis.ranks.rank_tables import ranks_to_json
from memprof.analysis.ranks.stragglers import Stragglers, find_stragglers
from memprof.trace.manifest import Capture, Manifest
from memprof.trace.schema import RankCollectives, Ranks
from memprof.trace.store import Trace
from tests.building import Module, Op, Storage, Tables, make_tables

WHOLE = Manifest(memprof_version="1.0", torch_version="2.13.0", world_size=4)


def job(activation: int, steps: int = 1) -> Tables:
    """Steps that hold a weight of 10 bytes in ``fc`` and an activation in ``act``."""
    return make_tables(
        [
            [
                Op(module="act", makes=["a"], reads=["w"]),
                Op(phase="backward", module="fc", reads=["a"], frees=["a"]),
                Op(phase="optimizer", mutates=["w"]),
            ]
        ]
        * steps,
        [Storage("w", 10, "parameter", module="fc"), Storage("a", activation, module="act")],
        modules=[Module("", "Net"), Module("fc"), Module("act", "GELU")],
    )


def trace_of(sizes: dict[int, int], **changes: object) -> Trace:
    return Trace.of(
        [(dataclasses.replace(WHOLE, rank=rank, **changes), job(size)) for rank, size in sizes.items()], "run.memprof"
    )


def test_the_worst_rank_and_the_spread() -> None:
    """Peaks of 14, 16, 30 and 13: rank 2 is worst, the median is 15, rank 3 has least."""
    found = compare_ranks(trace_of({0: 4, 1: 6, 2: 20, 3: 3}))
    assert found.worst == 2
    assert found.peak is not None
    assert (found.peak.least, found.peak.median, found.peak.most) == (13, 15, 30)
    assert (found.peak.least_rank, found.peak.most_rank, found.peak.bytes) == (3, 2, 17)
    assert found.peak.imbalance == 1.0
    assert [one.peak_bytes for one in found.ranks] == [14, 16, 30, 13]


def test_where_they_lie_apart() -> None:
    """They differ in the activation, which is the module act's, in forward and backward and not in the update."""
    found = compare_ranks(trace_of({0: 4, 1: 6, 2: 20, 3: 3}))
    assert {one.name: one.bytes for one in found.phases} == {"forward": 17, "backward": 17, "optimizer": 0}
    assert [(one.name, one.least, one.most) for one in found.categories] == [
        ("activation", 3, 20),
        ("parameter", 10, 10),
    ]
    assert [(one.name, one.bytes) for one in found.modules] == [("act", 17), ("fc", 0)]


def test_a_part_that_a_rank_lacks_counts_as_nothing() -> None:
    """A rank without activation holds 0 of it: the stages of a pipeline hold other modules."""
    found = compare_ranks(trace_of({0: 0, 1: 8}))
    assert {one.name: (one.least, one.least_rank) for one in found.modules}["act"] == (0, 0)


def test_the_lowest_of_equal_ranks_is_named() -> None:
    """Equal ranks are apart by nothing, and the lowest stands for them."""
    found = compare_ranks(trace_of({2: 4, 5: 4}))
    assert (found.worst, found.peak and found.peak.bytes) == (2, 0)


def test_curves_have_a_row_for_each_rank() -> None:
    """The curve of three operators has three stretches."""
    curves = read_curves(trace_of({0: 4, 1: 6}))
    assert curves.ranks.tolist() == [0, 1]
    assert curves.bytes.tolist() == [[14, 14, 10], [16, 16, 10]]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([0, 1], "0 and 1"),
        ([9, 4, 3, 2, 0], "0, 2 to 4 and 9"),
        (range(0, 60, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and more, 30 together"),
    ],
)
def test_numbers_are_written_as_people_do(numbers: list[int], text: str) -> None:
    """Runs are joined, and a long list is cut."""
    assert name_numbers(numbers) == text


def test_missing_ranks_are_told() -> None:
    """Of four ranks two files are missing; a part of a job misses none."""
    trace = trace_of({0: 4, 2: 4})
    assert job_notes(trace) == ("Of 4 ranks, ranks 1 and 3 are missing: there is no recording of them here.",)
    assert job_notes(trace, is_part=True) == ()
    assert job_notes(trace_of(dict.fromkeys(range(4), 4))) == ()


def test_mixed_versions_are_told() -> None:
    """Ranks recorded with other versions are named."""
    ranks = [
        (dataclasses.replace(WHOLE, world_size=2, rank=0), job(4)),
        (dataclasses.replace(WHOLE, world_size=2, rank=1, memprof_version="1.1", torch_version="2.12.0"), job(4)),
    ]
    assert job_notes(Trace.of(ranks, "run.memprof")) == (
        "The ranks were recorded with different versions of memprof: 1.0, 1.1.",
        "The ranks were recorded with different versions of torch: 2.12.0, 2.13.0.",
    )


def test_recordings_of_other_jobs_are_told() -> None:
    """A folder with files of jobs of other sizes is not one job."""
    ranks = [(dataclasses.replace(WHOLE, rank=rank, world_size=size), job(4)) for rank, size in enumerate((2, 4))]
    (note,) = job_notes(Trace.of(ranks, Path("run.memprof")))
    assert note == "These are recordings of different jobs, with 2 and 4 ranks."


def test_a_dead_rank_is_told_with_its_place() -> None:
    """Of two ranks that end early, the earlier one is described in full."""
    cut = Capture(False, "step 0, backward of fc", "the job was killed by SIGKILL", -9)
    ranks = [
        (dataclasses.replace(WHOLE, world_size=3, rank=0), job(4, steps=2)),
        (dataclasses.replace(WHOLE, world_size=3, rank=1, capture=Capture(False, "", "the job ended", 1)), job(4, 2)),
        (dataclasses.replace(WHOLE, world_size=3, rank=2, capture=cut), job(4)),
    ]
    (note,) = job_notes(Trace.of(ranks, "run.memprof"))
    assert note == (
        "The recording of rank 2 ends early, in step 0, backward of fc (the job was killed by SIGKILL); so does that "
        "of rank 1."
    )


def test_a_rank_that_stopped_while_others_went_on_is_told() -> None:
    """A rank that hangs after the window is complete, and seen in fewer steps."""
    ranks = [(dataclasses.replace(WHOLE, world_size=2, rank=rank), job(4, steps=3 - rank)) for rank in range(2)]
    assert job_notes(Trace.of(ranks, "run.memprof")) == (
        "Stopped early: rank 1 after step 1; others continued to step 2.",
    )


def test_json_has_every_rank() -> None:
    """The JSON has stable keys and plain numbers."""
    trace = trace_of({0: 4, 1: 6})
    found = ranks_to_json(compare_ranks(trace), find_stragglers(trace), job_notes(trace))
    assert found["worst_rank"] == 1
    assert [one["peak_allocated_bytes"] for one in found["ranks"]] == [14, 16]
    assert found["peak_spread"]["most_rank"] == 1
    assert found["stragglers"] == []


def test_scrubbing_leaves_no_machine_in_the_summaries() -> None:
    """The names of machines go, the figures and whose clock is whose stay."""
    from memprof.analysis.export.scrub import scrubbed
    from memprof.trace.schema import Ranks

    clean = scrubbed(trace_of({0: 4, 1: 6}, node="gpu07.example", clock="abc", world_size=2))
    assert set(clean.summary(Ranks).node) == {"…"}
    assert set(clean.summary(Ranks).clock) == {"…"}  # the number of the machine's start; one alone needs none
    assert compare_ranks(clean).worst == 1


def test_phases_that_ranks_name() -> None:
    """Phases that only some ranks name are listed after those of training."""
    tables = {
        rank: make_tables([[Op(makes=["a"]), Op(phase=f"rollout {rank}"), Op(phase="other")]], [Storage("a", 4 + rank)])
        for rank in range(3)
    }
    traces = [(Manifest(rank=rank, world_size=3), one) for rank, one in tables.items()]
    compared = compare_ranks(Trace.of(traces, "run.memprof"))
    assert [one.name for one in compared.phases] == ["forward", "rollout 0", "rollout 1", "rollout 2", "other"]
    assert [one.most for one in compared.phases] == [6, 4, 5, 6, 6]


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
