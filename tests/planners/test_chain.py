"""Planners for chains and repeated parts: rotor's dynamic programme, Gruslys 2016, and segments of forward."""

from __future__ import annotations

import math
import random
import time
from functools import cache

import numpy as np
import pytest

from memprof.planners.base import ScheduleRequest
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.graph.graph import Graph, graph_of
from memprof.planners.graph.schedule import replay
from memprof.planners.graph.segments import Cuts, SegmentSchedules, cut_evenly, cut_points, narrow_cuts
from memprof.planners.graph.stages import lines_of
from memprof.planners.published.bptt import Bptt, policy_for
from memprof.planners.published.chain import Chain
from memprof.planners.published.chain.options import stage_costs
from memprof.planners.published.chain.table import Table, grid_of
from memprof.planners.published.sqrt import Sqrt, cut_families, every_form, scan
from memprof.trace.step import Step
from tests.planners import graphs
from tests.planners.every_schedule import least_extra_us
from tests.planners.promises import check_answers, cost_us, peak_bytes, step_named


def _input_chain(seed: int, layers: int) -> Graph:
    """Layers of random sizes whose backward needs their input and not their output: rotor's own setting."""
    draw = random.Random(seed)
    step = graphs.mirrored(
        [[op_id - 1] if op_id else [] for op_id in range(layers)],
        [draw.randint(1, 9) * 100 for _ in range(layers)],
        [float(draw.randint(1, 20)) for _ in range(layers)],
        workspace_bytes=[draw.randint(0, 5) * 100 for _ in range(layers)],
    )
    return graph_of(step)


@pytest.mark.parametrize("seed", range(12))
def test_on_chains_it_equals_trying_all_schedules(seed: int) -> None:
    """Where every layer needs its input in backward, no schedule that holds what it keeps is faster in the budget.

    This is rotor's optimality; schedules that drop something they kept can be faster.
    """
    graph = _input_chain(seed, 3 + seed % 5)
    peak = peak_bytes(graph)
    for percent in (95, 85, 75, 65, 55, 45):
        budget = peak * percent // 100
        found = Chain().search(ScheduleRequest(graph, budget))
        assert cost_us(graph, found) == least_extra_us(graph, budget, is_persistent=True)


@pytest.mark.parametrize("seed", range(6))
def test_it_never_claims_more_than_there_is(seed: int) -> None:
    """Where layers need their outputs too, it is never faster than the best of all schedules."""
    graph = graph_of(graphs.uneven_chain(6, seed))
    for percent in (90, 75, 60):
        budget = peak_bytes(graph) * percent // 100
        assert cost_us(graph, Chain().search(ScheduleRequest(graph, budget))) >= least_extra_us(graph, budget)


def test_four_layers_by_hand() -> None:
    """Of four layers of 1000 bytes and 10 us, recorded with 4000 bytes at the peak, only the first is recomputed.

    Its output is dropped once the second layer has read it. Every backward then needs three times 1000 bytes: its
    input, its result, and the incoming gradient or another input.
    """
    graph = graph_of(graphs.chain(4))
    assert peak_bytes(graph) == 4000
    found = Chain().search(ScheduleRequest(graph, 3999))
    assert cost_us(graph, found) == 10.0
    assert found.runs is not None
    assert replay(graph, found.runs).peak_bytes == 3000


def test_identical_layers_are_solved_once() -> None:
    """A chain of 40 equal layers has as many different windows as lengths and ends, not as pairs of stages."""
    graph = graph_of(graphs.chain(40))
    (line,) = lines_of(graph)
    costs = stage_costs(graph, line)
    table = Table(line, costs, grid_of(line, costs, peak_bytes(graph)), lambda: False)
    assert len(line.stages) == 40
    assert len({id(cost) for cost in costs}) <= 4
    assert table.windows < 40 * 41 / 2 / 4


def test_time_up_at_once_is_said() -> None:
    """Without time it returns nothing, with a reason."""
    graph = graph_of(graphs.chain(30))
    found = Chain().search(ScheduleRequest(graph, peak_bytes(graph) // 2, deadline=time.monotonic() - 1))
    assert found.status == "time limit"
    assert found.runs is None


def _recurrent(steps: int) -> Step:
    """Steps of two products, a sum and a nonlinearity, the last of which is the state that passes on."""
    inputs: list[list[int]] = [[]]
    sizes, times = [400], [1.0]
    for _ in range(steps):
        state = len(inputs) - 1
        inputs += [[state], [state], [state + 1, state + 2], [state + 3]]
        sizes += [1600, 1600, 1600, 400]
        times += [20.0, 20.0, 2.0, 4.0]
    return graphs.mirrored(inputs, sizes, times)


def _revolve(steps: int, slots: int) -> int:
    """Forward steps of the optimal binomial schedule, the last one before each backward step with them.

    Griewank & Walther 2000 (Algorithm 799: revolve), section 2: with r the least number of repetitions for which
    beta(s, r) = (s + r)! / (s! r!) is at least l, r l - beta(s + 1, r - 1) steps are gone over again at least.
    """
    repeats = next(r for r in range(steps + 1) if math.comb(slots + r, slots) >= steps)
    return steps + repeats * steps - (math.comb(slots + repeats, slots + 1) if repeats else 0)


@pytest.mark.parametrize(("steps", "slots"), [(1, 1), (2, 1), (5, 1), (5, 2), (10, 3), (40, 4), (60, 10), (60, 80)])
def test_hidden_states_alone_equal_revolve(steps: int, slots: int) -> None:
    """The table is that of the binomial schedules, which are optimal for equal steps."""
    table = policy_for(steps, slots)
    for t in range(1, steps + 1):
        for m in range(1, slots + 1):
            assert table.cost[t, m] == _revolve(t, m)


def test_one_slot_by_hand() -> None:
    """With one slot every step starts from the beginning: C(t, 1) = t (t + 1) / 2. And C(3, 2) = 5 by hand.

    Keep the input of the second step (1 forward), go to the third (1) and through it (1), through the second (1),
    and through the first (1).
    """
    table = policy_for(5, 2)
    assert table.cost[:, 1].tolist() == [0, 1, 3, 6, 10, 15]
    assert table.cost[3, 2] == 5


@pytest.mark.parametrize("alpha", [1, 2, 3])
def test_the_mixed_form_equals_its_recurrence(alpha: int) -> None:
    """Internal states too: the table equals the published recurrence, evaluated literally."""

    @cache
    def cost(t: int, m: int) -> float:
        if t == 0:
            return 0
        if m < 1:
            return math.inf
        tries: list[float] = [t * (t + 1) / 2] if m == 1 else [1.0] if t == 1 else []
        if m > 1:
            tries += [y + cost(t - y, m - 1) + cost(y, m) for y in range(1, t)]
        if m > alpha:
            tries += [y + cost(t - y, m - alpha) + cost(y - 1, m) for y in range(1, t + 1)]
        return min(tries)

    table = policy_for(14, 9, alpha)
    for t in range(1, 15):
        for m in range(1, 10):
            assert table.cost[t, m] == cost(t, m)


def test_the_papers_headline() -> None:
    """1000 steps with 5 % of the memory take about one third more time than keeping everything.

    Time in forward steps, a backward step being two of them; an internal state as large as a hidden one.
    """
    forwards = policy_for(1000, 50, 1).cost[1000, 50]
    more = (forwards + 2 * 1000) / (1000 + 2 * 1000) - 1
    assert 0.30 < more < 0.34


def test_every_answer_about_a_recurrent_network_is_true() -> None:
    """Never over budget, never slower with more, and what it says about the least budget holds."""
    check_answers(Bptt(), _recurrent(12), (1.0, 0.7, 0.4, 0.2))


@pytest.mark.parametrize("name", ["gpt", "recurrent", "chain"])
def test_it_finds_what_repeats(name: str) -> None:
    """Layers of a transformer, steps of a recurrent network and equal layers fit into half of the memory."""
    graph = graph_of(_recurrent(12) if name == "recurrent" else step_named(name))
    found = Bptt().search(ScheduleRequest(graph, peak_bytes(graph) // 2))
    assert found.status == "found"
    assert found.runs is not None


def test_where_nothing_repeats_it_says_so() -> None:
    """A chain of layers that all differ has no repeated part."""
    graph = graph_of(graphs.uneven_chain(8, seed=1))
    found = Bptt().search(ScheduleRequest(graph, peak_bytes(graph) - 1))
    assert found.status == "nothing found"
    assert found.reason == "No part of the step repeats."


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
