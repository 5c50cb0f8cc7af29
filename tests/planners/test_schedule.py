"""Schedules, which run operators in some order and some twice, and steps cut into stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import InvariantError
from memprof.planners.base import ScheduleRequest
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.graph.graph import Graph, graph_of, needed_bytes
from memprof.planners.graph.moves import Reads, lives_at
from memprof.planners.graph.schedule import as_recorded, replay, scheduled_step
from memprof.planners.graph.stages import lines_of
from memprof.planners.graph.writing import Demand, Walk
from memprof.planners.published.chain import Chain
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.planners import graphs
from tests.planners.graphs import chain, random_graph
from tests.planners.promises import STEPS, peak_bytes, step_named

SAMPLES = Path(__file__).parent.parent.parent / "sample_traces"


def sample(name: str) -> Step:
    return Trace.open(SAMPLES / name / "run.memprof").steady_step()


def some_dropped(graph: Graph, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(graph.values) < 0.5


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm"])
def test_recorded_schedule_is_the_recording(name: str) -> None:
    """Running everything once, in its order, gives the recorded bytes at every operator, and no time on top."""
    step = sample(name)
    graph = graph_of(step)
    done = replay(graph, as_recorded(graph))
    assert np.array_equal(done.during_bytes, live_bytes(step).during)
    assert done.extra_us == 0
    assert graph.is_saved().any()


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm"])
@pytest.mark.parametrize("seed", range(3))
def test_schedule_and_the_step_it_leads_to_agree(name: str, seed: int) -> None:
    """The rewritten step keeps what every step promises, and holds at each run the bytes the schedule says."""
    step = sample(name)
    graph = graph_of(step)
    done = replay(graph, Demand(graph).schedule(some_dropped(graph, seed)))
    predicted = scheduled_step(step, graph, done.runs)
    assert np.array_equal(live_bytes(predicted).during, done.during_bytes)
    assert predicted.duration_us == pytest.approx(step.duration_us + done.extra_us)
    assert predicted.ops.is_recompute.sum() - step.ops.is_recompute.sum() == done.is_again.sum() > 0


@given(seed=st.integers(0, 10_000), operators=st.integers(2, 25))
def test_any_choice_of_dropped_values_can_be_replayed(seed: int, operators: int) -> None:
    """On any graph, whatever is dropped is made again in time, and schedule and step agree."""
    step = random_graph(operators, seed)
    graph = graph_of(step)
    done = replay(graph, Demand(graph).schedule(some_dropped(graph, seed)))
    assert np.array_equal(live_bytes(scheduled_step(step, graph, done.runs)).during, done.during_bytes)


def test_repeats_use_no_storage_without_bytes() -> None:
    """An operator that makes and reads empty tensors can run again after they are gone."""
    step = step_from_arrays(
        time_us=[10.0] * 6,
        output_bytes=[1000, 0, 1000, 10, 10, 10],
        inputs=[[], [0], [0, 1], [2], [2, 3], [4, 0]],
        is_backward=[False] * 3 + [True] * 3,
    )
    scheduled = scheduled_step(step, graph_of(step), np.array([0, 1, 2, 3, 0, 1, 2, 4, 5]))
    assert scheduled.uses.op_id[scheduled.storages.allocated_bytes[scheduled.uses.storage_id] == 0].tolist() == [1, 2]
    uses = list(zip(scheduled.uses.op_id.tolist(), scheduled.uses.role.tolist(), strict=True))
    assert [use for use in uses if use[0] in (4, 5, 6)] == [(4, "write"), (5, "read"), (6, "read"), (6, "write")]


def test_one_value_made_again_by_hand() -> None:
    """Of three layers the second's output is dropped and made again: 10 us more, and room for it in between."""
    step = chain(3)
    graph = graph_of(step)
    plain = replay(graph, as_recorded(graph))
    dropped = np.zeros(graph.values, dtype=bool)
    dropped[1] = True
    done = replay(graph, Demand(graph).schedule(dropped))
    # The backward of the last layer (operator 3) needs it: its operator runs right before.
    assert done.runs.tolist() == [0, 1, 2, 1, 3, 4, 5]
    assert done.extra_us == 10.0
    # Outputs of 1,000 bytes: the last layer reads its input, which is gone once it has run, and which the second run
    # makes again.
    assert plain.during_bytes.tolist() == [1000, 2000, 3000, 3000, 3000, 1001]
    assert done.during_bytes.tolist() == [1000, 2000, 3000, 2000, 3000, 3000, 1001]


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        ([0, 1, 2, 3, 4], "leaves out 1 of the step's 6"),
        ([1, 0, 2, 3, 4, 5], "changes the order"),
        ([0, 1, 2, 3, 3, 4, 5], "operator 3, which cannot be rerun"),
        ([0, 1, 2, 3, 4, 5, 6], "does not have"),
    ],
)
def test_what_is_no_schedule_is_refused(runs: list[int], sentence: str) -> None:
    """Left out, out of order, twice though it may not, unknown: each has its sentence."""
    with pytest.raises(InvariantError, match=sentence):
        replay(graph_of(chain(3)), np.array(runs))


def test_a_repeat_belongs_to_the_phase_of_the_operator_that_it_runs_for() -> None:
    """What the last operator, a backward one, reads is made again right before it, in backward."""
    step = step_from_arrays(
        time_us=[10, 20, 40], output_bytes=[100, 200, 300], inputs=[[], [0], [0, 1]], is_backward=[False, False, True]
    )
    graph = graph_of(step)
    found = scheduled_step(step, graph, np.array([0, 1, 0, 2]))
    assert found.ops.phase.tolist() == ["forward", "forward", "backward", "backward"]
    assert found.ops.is_recompute.tolist() == [False, False, True, False]
    assert found.ops.duration_us.tolist() == [10, 20, 10, 40]
    # Made, freed once operator 1 has read it, and made again.
    assert live_bytes(found).during.tolist() == replay(graph, np.array([0, 1, 0, 2])).during_bytes.tolist()


def test_a_step_in_which_nothing_is_read_keeps_its_only_operator() -> None:
    """There is no use of a value to point elsewhere."""
    step = step_from_arrays(time_us=[5], output_bytes=[10], inputs=[[]], is_backward=[False])
    found = scheduled_step(step, graph_of(step), np.array([0]))
    assert live_bytes(found).during.tolist() == [10]
    assert found.uses.role.tolist() == step.uses.role.tolist()


def test_value_changed_in_place_is_made_again_from_its_start() -> None:
    """An operator that works in place runs again on a copy that is made again first, never on what it has changed."""
    # 0 makes, 1 changes it in place, 2 reads it; backward reads the changed value.
    step = step_from_arrays(
        time_us=[1, 2, 4, 8, 16],
        output_bytes=[100, 0, 10, 5, 5],
        inputs=[[], [0], [1], [2], [1, 3]],
        is_backward=[False, False, False, True, True],
        in_place=[-1, 0, -1, -1, -1],
    )
    graph = graph_of(step)
    assert graph.taken_from.tolist() == [-1, 0, -1]
    dropped = np.array([False, True, False])
    done = replay(graph, Demand(graph).schedule(dropped))
    assert done.runs.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert done.extra_us == 3.0
    with pytest.raises(InvariantError, match="changed"):
        replay(graph, np.array([0, 1, 2, 3, 1, 4]))


def test_the_next_read_of_a_value_comes_after_the_run() -> None:
    """A value that runs 1 and 3 read: after run 1 it is read by run 3, and after run 3 by none of the four."""
    graph = graph_of(
        step_from_arrays(
            time_us=[1.0] * 4,
            output_bytes=[10] * 4,
            inputs=[[], [0], [1], [0, 2]],
            is_backward=[False, False, True, True],
        )
    )
    done = replay(graph, as_recorded(graph))
    life = lives_at(done, np.array([0, 0, 1, 3]), np.array([0, 3, 0, 2]))
    assert (life >= 0).tolist() == [True, True, False, False]
    assert life[0] == life[1]
    first = np.full(4, life[0])
    assert Reads(done).next_after(first, np.array([0, 1, 2, 3])).tolist() == [1, 3, 3, 4]


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
