"""Cutting a step into stages, and walking through them."""

from __future__ import annotations

import numpy as np
import pytest

from memprof.planners.base import ScheduleRequest
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.graph.graph import graph_of, needed_bytes
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.planners.graph.stages import lines_of
from memprof.planners.graph.writing import Walk
from memprof.planners.published.chain import Chain
from memprof.trace.step import Step
from tests.planners import graphs
from tests.planners.promises import STEPS, peak_bytes, step_named


def _rounds(count: int, layers: int) -> Step:
    """Several rounds of forward and backward through a chain in one step, as micro-batches are."""
    inputs: list[list[int]] = []
    backward: list[bool] = []
    for _ in range(count):
        start = len(inputs)
        inputs += [[start + layer - 1] if layer else [] for layer in range(layers)]
        for layer in reversed(range(layers)):
            gradient = [len(inputs) - 1] if layer < layers - 1 else []
            inputs.append([*([start + layer - 1] if layer else []), *gradient])
        backward += [False] * layers + [True] * layers
    size = len(inputs)
    return step_from_arrays(time_us=[10.0] * size, output_bytes=[1000] * size, inputs=inputs, is_backward=backward)


def test_a_chain_is_cut_at_every_layer_by_hand() -> None:
    """Four layers: four stages, each with its neighbour's output as its input and its own backward operator."""
    (line,) = lines_of(graph_of(graphs.chain(4)))
    assert [(stage.first_op, stage.end_op) for stage in line.stages] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [stage.inputs for stage in line.stages] == [(), (0,), (1,), (2,)]
    assert [stage.outputs for stage in line.stages] == [(0,), (1,), (2,), ()]
    # Backward of layer 3 is operator 4, of layer 0 operator 7, which reads no value and goes with that of layer 1.
    assert [stage.backward_op for stage in line.stages] == [8, 6, 5, 4]


def test_skips_prevent_cuts_unless_they_are_kept() -> None:
    """Between the ends of a U-Net everything passes through no single value; with its skips kept, it does."""
    graph = graph_of(graphs.unet(4))
    (narrow,), (wide,) = lines_of(graph), lines_of(graph, widest=8)
    assert len(narrow.stages) == 4
    assert len(wide.stages) == 12


def test_rounds_are_lines_of_their_own() -> None:
    """Each micro-batch is a chain, and all of them are solved for the budget."""
    graph = graph_of(_rounds(3, 6))
    lines = lines_of(graph)
    assert [len(line.stages) for line in lines] == [6, 6, 6]
    one = graph_of(_rounds(1, 6))
    budget = peak_bytes(one) * 7 // 10
    for_one, for_all = (Chain().search(ScheduleRequest(each, budget)).runs for each in (one, graph))
    assert for_one is not None
    assert for_all is not None
    assert replay(graph, for_all).peak_bytes <= budget
    assert replay(graph, for_all).extra_us == 3 * replay(one, for_one).extra_us


@pytest.mark.parametrize("name", STEPS)
def test_a_walk_that_keeps_everything_is_the_step_as_recorded(name: str) -> None:
    """Going through all stages and keeping all values repeats nothing."""
    graph = graph_of(step_named(name))
    walk = Walk(graph)
    for line in lines_of(graph):
        for stage in line.stages:
            walk.save(stage, stage.values)
        for stage in reversed(line.stages):
            walk.backward(stage)
    assert np.array_equal(walk.runs(), as_recorded(graph))


@pytest.mark.parametrize("name", STEPS)
def test_a_walk_that_keeps_nothing_is_a_schedule(name: str) -> None:
    """Keeping nothing but what passes on, every stage is made again from the start, and the replay accepts it."""
    graph = graph_of(step_named(name))
    walk = Walk(graph)
    for line in lines_of(graph, most_stages=20):
        for end in reversed(range(len(line.stages))):
            if end:
                walk.advance(line.stages[:end])
            if end == len(line.stages) - 1:
                walk.save(line.stages[end], ())
            walk.backward(line.stages[end])
    assert replay(graph, walk.runs()).extra_us > 0


def test_one_operator_needs_what_it_reads_and_makes_by_hand() -> None:
    """In a chain, a backward operator reads an input and a gradient and makes a gradient: three times 1000 bytes."""
    assert needed_bytes(graph_of(graphs.chain(6))) == 3000
