"""Tests of the planner that cuts forward into segments."""

from __future__ import annotations

import math

import numpy as np
import pytest

from memprof.planners.base import ScheduleRequest
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.graph.graph import Graph, graph_of
from memprof.planners.graph.schedule import replay
from memprof.planners.graph.segments import Cuts, SegmentSchedules, cut_evenly, cut_points, narrow_cuts
from memprof.planners.published.sqrt import Sqrt, cut_families, every_form, scan
from tests.planners import graphs
from tests.planners.promises import peak_bytes


def least(graph: Graph, form: str) -> tuple[int, float]:
    """Returns the least peak of one form over all cut points, and the time it adds."""
    schedules = SegmentSchedules(graph)
    done = []
    for segments, how in every_form(cut_points(graph)):
        if form in how:
            runs = schedules.schedule(segments, most_runs=40 * graph.ops)
            assert runs is not None
            replayed = replay(graph, runs)
            done.append((replayed.peak_bytes, replayed.extra_us))
    return min(done)


@pytest.mark.parametrize("layers", [10, 100, 1000])
@pytest.mark.parametrize("form", ["the √N form", "the budgeted scan"])
def test_root_form_follows_twice_the_root_for_one_forward_more(layers: int, form: str) -> None:
    """On N equal layers, √N segments and the scan need 2√N layers' bytes and at most one more forward."""
    graph = graph_of(graphs.chain(layers, output_bytes=1000, time_us=10.0))
    peak, extra_us = least(graph, form)
    # k segments: k - 1 values kept, the last segment's other N / k - 1 values, and two gradients, one read, one made.
    assert abs(peak / 1000 - 2 * math.sqrt(layers)) <= 1
    assert extra_us <= layers * 10.0 * 1.0001


@pytest.mark.parametrize("layers", [10, 100, 1000])
def test_recursive_form_follows_the_logarithm(layers: int) -> None:
    """Segments within segments need log N layers' bytes, for at most log N more forwards."""
    graph = graph_of(graphs.chain(layers, output_bytes=1000, time_us=10.0))
    peak, extra_us = least(graph, "the recursive form")
    assert peak / 1000 <= math.log2(layers) + 4
    assert extra_us <= layers * 10.0 * math.ceil(math.log2(layers))


def test_three_segments_of_three_by_hand() -> None:
    """Nine layers in three segments: two layers are kept, what else is in the first two segments is made again."""
    graph = graph_of(graphs.chain(9))
    (cuts,) = cut_points(graph)
    runs = SegmentSchedules(graph).schedule(cut_evenly(cuts, parts=3, levels=1), most_runs=100)
    assert runs is not None
    # Backward reads layers 0 to 7, so the segments are 0 to 2, 3 and 4, and the rest, which is as forward left it.
    # Operator 9 + i is the backward of layer 8 - i and reads layer 7 - i: layer 3 is missed at 13, layer 1 at 15.
    assert runs.tolist() == [*range(9), *range(9, 13), 3, 13, 14, 0, 1, 15, 16, 17]


def test_scan_cuts_where_more_than_the_budget_has_come_together() -> None:
    """Sizes 4, 3, 3, 5, 1 and 2 with b = 6 are cut after the second and after the fourth, where 7 and 8 are passed."""
    sizes = np.array([4, 3, 3, 5, 1, 2])
    cuts = Cuts(0, after_op=np.arange(5), made_bytes=sizes, passed_bytes=sizes[:5])
    segments = scan(cuts, 6)
    assert [segment.start_op for segment in segments] == [0, 2, 4]
    assert [segment.cuts for segment in segments] == [(), (1,), (1, 3)]
    assert [segment.is_last for segment in segments] == [False, False, True]


def test_cut_points_are_what_everything_passes_through() -> None:
    """In residual blocks the only places are between them: within, the block's input passes beside the convolutions."""
    graph = graph_of(graphs.residual(2))
    (cuts,) = cut_points(graph)
    # Operator 0, then five operators, an addition and an activation for each block: the addition ends the skip.
    assert cuts.after_op.tolist() == [0, 6, 7, 13]


def test_where_skips_pass_everything_narrow_places_are_candidates() -> None:
    """A U-Net's skips pass nearly every place, so places where few bytes pass are tried too."""
    families = {where: cuts for cuts, where in cut_families(graph_of(graphs.unet(4)))}
    narrow = families["narrow cuts"]
    assert sum(len(cuts.after_op) for cuts in narrow) >= 3


def test_every_round_of_forward_is_cut_for_itself() -> None:
    """In two micro-batches each forward is followed by its own backward, which finds its last segment in memory."""
    one = graphs.chain(8)
    times, inputs, backward = one.ops.duration_us.tolist(), [[x - 1] if x else [] for x in range(8)], [False] * 8
    inputs += [[x for x in (6 - place, 7 + place) if x >= 0 and (place or x != 7)] for place in range(8)]
    backward += [True] * 8
    step = step_from_arrays(
        time_us=times * 2,
        output_bytes=[1000] * 32,
        inputs=inputs + [[x + 16 for x in read] for read in inputs],
        is_backward=backward * 2,
    )
    graph = graph_of(step)
    rounds = cut_points(graph)
    assert [cuts.start_op for cuts in rounds] == [0, 16]
    segments = [segment for cuts in rounds for segment in cut_evenly(cuts, parts=2, levels=1)]
    runs = SegmentSchedules(graph).schedule(segments, most_runs=200)
    assert runs is not None
    done = replay(graph, runs)
    # Each round makes the first of its two segments again, but for the layer that is kept.
    assert sorted(done.runs[done.is_again].tolist()) == [0, 1, 2, 16, 17, 18]


def test_reason_names_the_form() -> None:
    """A budget met only by nested segments is answered with these, and the reason says so."""
    graph = graph_of(graphs.chain(100))
    found = Sqrt().search(ScheduleRequest(graph, 12_000))
    assert found.runs is not None
    assert "recursive form" in found.reason
    assert "99 values that every path crosses" in found.reason


def test_out_of_time_says_so() -> None:
    """A deadline that has passed is answered with what there is, not with a claim."""
    graph = graph_of(graphs.chain(50))
    found = Sqrt().search(ScheduleRequest(graph, peak_bytes(graph) // 2, deadline=0.0))
    assert found.status == "time limit"
    assert found.runs is None


def test_narrow_places_of_a_chain_are_its_cut_points() -> None:
    """Where every place is equally wide, every place is one."""
    graph = graph_of(graphs.chain(12))
    assert narrow_cuts(graph)[0].after_op.tolist() == cut_points(graph)[0].after_op.tolist()
