"""What is saved for backward, by which module, and what recomputing it would cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given

from memprof.analysis.report.module_tree import folded_tree, module_tree
from memprof.analysis.report.saved import RecomputeCost, find_saved, summarise_saved, weigh_recompute
from memprof.trace.step import Step
from tests.building import Module, Op, Storage, make_step, make_trace
from tests.strategies import jobs

MODULES = [Module("", "Net"), Module("block", "Block"), Module("block.a"), Module("block.b"), Module("head")]


def forward_and_backward(micro_batch: int = 0, first: int = 0) -> list[Op]:
    """x -> a -> h1 -> b -> h2 -> b -> h3 -> head -> y; each operator keeps its input for backward."""
    forward = [
        Op(module="block.a", makes=["h1"], reads=["x"], saves=["x"], duration_us=10, flops=1),
        Op(module="block.b", makes=["h2"], reads=["h1", "w"], saves=["h1", "w"], duration_us=20, flops=2),
        Op(module="block.b", makes=["h3"], reads=["h2"], saves=["h2", "h1"], duration_us=30, flops=4),
        Op(module="head", makes=["y"], reads=["h3"], saves=["h3"], duration_us=40, flops=8),
    ]
    backward = [
        Op("b", "backward", "head", reads=["h3"], frees=["h3", "y"], forward=first + 3, duration_us=100),
        Op("b", "backward", "block.b", reads=["h2", "h1"], frees=["h2"], forward=first + 2, duration_us=100),
        Op("b", "backward", "block.b", reads=["h1", "w"], frees=["h1"], forward=first + 1, duration_us=100),
        Op("b", "backward", "block.a", reads=["x"], forward=first, duration_us=100),
    ]
    for op in [*forward, *backward]:
        object.__setattr__(op, "micro_batch", micro_batch)
    return [*forward, *backward]


STORAGES = [
    Storage("x", 10, "input"),
    Storage("w", 5, "parameter"),
    Storage("h1", 100),
    Storage("h2", 200),
    Storage("h3", 50),
    Storage("y", 20),
]


@pytest.fixture
def step() -> Step:
    return make_step(forward_and_backward(), STORAGES, MODULES)


def costs_of(step: Step) -> dict[str, RecomputeCost]:
    tree = module_tree(step.modules)
    return {tree.names[cost.node]: cost for cost in weigh_recompute(step, find_saved(step), tree, tree)}


def test_each_storage_is_counted_once_by_its_first_saver(step: Step) -> None:
    """h1 is kept by two operators, x by one; the parameter is alive anyway and not counted."""
    saved = find_saved(step)
    kept = {(int(size), int(op)) for size, op in zip(saved.bytes, saved.saver_op_id, strict=True)}
    assert kept == {(10, 0), (100, 1), (200, 2), (50, 3)}


def test_saved_bytes_are_summed_by_module_at_their_fullest(step: Step) -> None:
    """All 360 bytes are kept when the head has run: 300 by b, 50 by the head, 10 by a."""
    tree = module_tree(step.modules)
    summary = summarise_saved(step, find_saved(step), tree)
    assert (summary.op_id, summary.storages, summary.by_module.total_bytes) == (3, 4, 360)
    rows = {tree.names[part.key]: part.bytes for part in summary.by_module.parts if part.key is not None}
    assert rows == {"block.b": 300, "head": 50, "block.a": 10}


def test_saved_bytes_of_another_moment(step: Step) -> None:
    """While the second b's backward runs, h3 has been released: 10 + 100 + 200 are kept."""
    summary = summarise_saved(step, find_saved(step), module_tree(step.modules), op_id=5)
    assert summary.by_module.total_bytes == 310


def test_recompute_frees_what_only_the_module_keeps(step: Step) -> None:
    """The block frees h1 and h2 but not h3, which the head keeps; b alone frees only h2, made and kept inside it."""
    costs = costs_of(step)
    assert {name: cost.freed_bytes for name, cost in costs.items()} == {"block": 300, "block.b": 200}
    assert (costs["block"].time_us, costs["block"].flops) == (60.0, 7)
    assert (costs["block.b"].time_us, costs["block.b"].flops) == (50.0, 6)


def test_recompute_is_ranked_by_bytes_freed_per_microsecond(step: Step) -> None:
    """The block frees 300 / 60 = 5 bytes per microsecond, b 200 / 50 = 4."""
    costs = list(costs_of(step).items())
    assert [(name, cost.bytes_per_us) for name, cost in costs] == [("block", 5.0), ("block.b", 4.0)]


def test_micro_batches_free_once_but_cost_every_time() -> None:
    """Two rounds: no more bytes are kept at a time than in one, and recomputing takes twice as long."""
    step = make_step([*forward_and_backward(), *forward_and_backward(1, first=8)], STORAGES, MODULES)
    costs = costs_of(step)
    assert (costs["block"].freed_bytes, costs["block"].time_us, costs["block"].flops) == (300, 120.0, 14)
    assert summarise_saved(step, find_saved(step), module_tree(step.modules)).by_module.total_bytes == 360


def test_unknown_times_stay_unknown(step: Step) -> None:
    """Without operator times the cost is unknown, and rows are ranked by bytes."""
    untimed = make_step(forward_and_backward(), STORAGES, MODULES)
    object.__setattr__(untimed, "ops", untimed.ops.replace(duration_us=np.full(len(untimed.ops), np.nan)))
    costs = costs_of(untimed)
    assert list(costs) == ["block", "block.b"]
    assert all(math.isnan(cost.time_us) and math.isnan(cost.bytes_per_us) for cost in costs.values())


def test_modules_that_recompute_already_free_nothing_more() -> None:
    """What a checkpointed forward makes again inside backward is not kept by forward."""
    ops = [
        Op(module="block", reads=["x"], makes=["y"]),
        Op("r", "backward", "block", makes=["h1"], reads=["x"], saves=["h1"], is_recompute=True),
        Op("b", "backward", "block", reads=["h1"], frees=["h1", "y"], forward=1),
    ]
    assert costs_of(make_step(ops, STORAGES, MODULES)) == {}


def layers(count: int) -> tuple[Sequence[Op], Sequence[Storage]]:
    """Layer i makes a (kept by itself) and o (kept by the next layer)."""
    forward: list[Op] = []
    storages = [Storage("o-1", 1, "input")]
    for i in range(count):
        storages += [Storage(f"a{i}", 10), Storage(f"o{i}", 100)]
        forward.append(Op(module=f"layers.{i}", makes=[f"a{i}"], reads=[f"o{i - 1}"], saves=[f"o{i - 1}"]))
        forward.append(Op(module=f"layers.{i}", makes=[f"o{i}"], reads=[f"a{i}"], saves=[f"a{i}"]))
    return forward, storages


def test_folded_layers_are_checkpointed_each_by_itself() -> None:
    """Layers i.o are kept by the next layer: four layers free 4 x 10 bytes, not the outputs between them."""
    step = make_step(*layers(4))
    modules, folded = module_tree(step.modules), folded_tree(step.modules)
    # The list that holds the layers is called in this hand-made step only.
    costs = {folded.names[cost.node]: cost for cost in weigh_recompute(step, find_saved(step), modules, folded)}
    assert (costs["layers.*"].freed_bytes, costs["layers.*"].time_us) == (40, 8.0)


def test_containers_that_are_never_called_have_no_row() -> None:
    """A ModuleList cannot be checkpointed: it has no forward."""
    step = make_step(*layers(2))
    container = list(step.modules.name).index("layers")
    calls = step.module_calls.take(step.module_calls.module_id != container)
    object.__setattr__(step, "module_calls", calls)
    assert set(costs_of(step)) == {"layers.0", "layers.1"}


@given(jobs())
def test_saved_parts_sum_to_what_is_kept(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """In random jobs: at every operator the parts sum to the whole, and nothing kept is dead."""
    trace = make_trace(*job)
    for number in trace.recorded_steps:
        step = trace.step(number)
        saved, tree = find_saved(step), module_tree(step.modules)
        fullest = summarise_saved(step, saved, tree)
        for op_id in range(len(step.ops)):
            summary = summarise_saved(step, saved, tree, op_id)
            rows = saved.rows[saved.kept_at(op_id)]
            freed = step.storages.freed_op_id[rows]
            assert summary.by_module.total_bytes == step.storages.allocated_bytes[rows].sum()
            assert sum(part.bytes for part in summary.by_module.parts) == summary.by_module.total_bytes
            assert summary.by_module.total_bytes <= fullest.by_module.total_bytes
            assert ((freed == -1) | (freed >= op_id)).all()
        weigh_recompute(step, saved, tree, folded_tree(step.modules))
