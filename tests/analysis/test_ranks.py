"""Comparison of ranks: the worst, their spread, and missing ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from memprof.analysis.ranks.rank_report import compare_ranks, job_notes, name_numbers, read_curves
from memprof.analysis.ranks.rank_tables import ranks_to_json
from memprof.analysis.ranks.stragglers import find_stragglers
from memprof.trace.manifest import Capture, Manifest
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
