"""Breakdowns of live bytes at the peak, and the maxima of phases and categories."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.analysis.report.breakdown import (
    Breakdown,
    Part,
    by_category,
    by_module,
    by_op,
    by_phase,
    by_source,
    by_stack,
    hold_at,
)
from memprof.analysis.report.module_tree import folded_tree, module_tree
from memprof.analysis.report.moments import find_category_maxima, find_peak, find_phase_peaks
from memprof.analysis.report.sources import find_sources
from memprof.analysis.report.table_rows import choose_rows
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from tests.building import Module, Op, Storage, make_step, make_trace
from tests.strategies import jobs

STACK = "/site-packages/torch/nn/linear.py:1:forward\n/job/model.py:{line}:forward\n/job/train.py:9:main"


@pytest.fixture
def step() -> Step:
    """Three operators; 1000 bytes of weights are live, 600 bytes are allocated, 7 are workspace of the last."""
    ops = [
        Op("aten.addmm.default", module="fc", makes=["a"], reads=["w"], stack=STACK.format(line=5)),
        Op("aten.relu.default", module="act", makes=["b"], reads=["a"], stack=STACK.format(line=6)),
        Op("aten.mm.default", "backward", "fc", makes=["t"], reads=["b"], workspace=7, stack=STACK.format(line=5)),
    ]
    storages = [
        Storage("w", 1000, "parameter", name="fc.weight", module="fc"),
        Storage("a", 100, module="fc"),
        Storage("b", 200, module="act"),
        Storage("t", 300, "temporary", module="fc"),
        Storage("foreign", 0, "unknown"),
    ]
    return make_step(ops, storages, [Module("", "Net"), Module("fc"), Module("act", "ReLU")])


def pairs(split: Breakdown[Any]) -> dict[object, tuple[int, int]]:
    return {part.key: (part.bytes, part.storages) for part in split.parts}


def test_categories_are_summed_with_workspace_as_its_own(step: Step) -> None:
    """What a kernel holds besides storages is a category like any other."""
    split = by_category(hold_at(step, 2))
    assert [part.key for part in split.parts] == ["parameter", "activation", "temporary", "workspace"]
    assert pairs(split) == {"parameter": (1000, 1), "activation": (300, 2), "temporary": (300, 1), "workspace": (7, 0)}
    assert split.total_bytes == 1607


def test_memory_belongs_to_its_module_and_workspace_to_the_operators(step: Step) -> None:
    """The matmul's 7 bytes of workspace are its module's: fc has 1000 + 100 + 300 + 7."""
    tree = module_tree(step.modules)
    split = by_module(hold_at(step, 2), tree)
    assert {tree.names[part.key]: part.bytes for part in split.parts if part.key is not None} == {
        "fc": 1407,
        "act": 200,
    }


def test_operators_are_those_that_made_the_memory(step: Step) -> None:
    """What was alive before the step was made by no operator of it."""
    assert pairs(by_op(hold_at(step, 2))) == {
        None: (1000, 1),
        "aten.mm.default": (307, 1),
        "aten.relu.default": (200, 1),
        "aten.addmm.default": (100, 1),
    }


def test_source_lines_are_the_users_own(step: Step) -> None:
    """torch's own frame is passed over: both matmuls are called in line 5 of model.py."""
    split = by_source(hold_at(step, 2), find_sources(step.stacks))
    assert {part.key.place if part.key else None: part.bytes for part in split.parts} == {
        None: 1000,
        "model.py:5": 407,
        "model.py:6": 200,
    }


def test_stacks_are_the_users_frames(step: Step) -> None:
    """A stack is identified by the frames of the user's code, innermost first."""
    split = by_stack(hold_at(step, 1), find_sources(step.stacks))
    assert {tuple(line.place for line in part.key or ()): part.bytes for part in split.parts} == {
        (): 1000,
        ("model.py:6", "train.py:9"): 200,
        ("model.py:5", "train.py:9"): 100,
    }


def test_phases_are_those_in_which_the_memory_was_made(step: Step) -> None:
    """300 bytes were made in forward, 307 in backward, 1000 before."""
    assert pairs(by_phase(hold_at(step, 2))) == {None: (1000, 1), "backward": (307, 1), "forward": (300, 2)}


def test_what_was_freed_is_not_alive() -> None:
    """A storage counts while the operator runs after which it is freed, and no longer."""
    step = make_step([Op(makes=["a"], frees=["a"]), Op(makes=["b"])], [Storage("a", 10), Storage("b", 4)])
    assert [hold_at(step, op).total_bytes for op in (0, 1)] == [10, 4]


def test_cut_parts_are_summed() -> None:
    """Of four parts, three rows show two and the sum of the other two."""
    split = Breakdown(10, (Part("a", 4, 1), Part("b", 3, 1), Part("c", 2, 5), Part("d", 1, 1)))
    shown, rest, cut = split.top(3)
    assert [part.key for part in shown] == ["a", "b"]
    assert rest == Part(None, 3, 6)
    assert cut == 2
    assert split.top(4) == (split.parts, None, 0)


@given(jobs(), st.integers(1, 8))
def test_the_parts_of_every_split_sum_to_the_live_bytes(job: tuple[list[list[Op]], list[Storage]], limit: int) -> None:
    """At every operator of a random job: category, module, operator, line, stack and phase, cut or not."""
    trace = make_trace(*job)
    for number in trace.recorded_steps:
        step = trace.step(number)
        sources, during = find_sources(step.stacks), live_bytes(step).during
        trees = (module_tree(step.modules), folded_tree(step.modules))
        for op_id in range(len(step.ops)):
            holding = hold_at(step, op_id)
            splits: list[Breakdown[Any]] = [
                by_category(holding),
                by_op(holding),
                by_phase(holding),
                by_source(holding, sources),
                by_stack(holding, sources),
                *(by_module(holding, tree) for tree in trees),
            ]
            for split in splits:
                shown, rest, _ = split.top(limit)
                assert split.total_bytes == during[op_id]
                assert sum(part.bytes for part in split.parts) == during[op_id]
                assert sum(part.bytes for part in shown) + (rest.bytes if rest else 0) == during[op_id]
            for tree in trees:
                rows = choose_rows(by_module(holding, tree), tree, limit)
                assert sum(row.bytes for row in rows if row.depth == 0) == during[op_id]


def test_what_an_earlier_step_made_has_its_line() -> None:
    """Memory that stays from step to step is known by where it was made, if that was recorded."""
    kept = Storage("kept", 512)
    trace = make_trace(
        [
            [Op(makes=("kept",), stack="train.py:9:main"), Op(phase="optimizer", name="aten.add_.Tensor")],
            [Op(makes=("new",), stack="train.py:5:main"), Op(phase="optimizer", name="aten.add_.Tensor")],
        ],
        [kept, Storage("new", 64), Storage("old", 128)],
    )
    step = trace.step(1)
    sources = find_sources(step.stacks)
    known = by_source(hold_at(step, 1, trace.earlier_stacks(step)), sources)
    assert {part.key and part.key.place: part.bytes for part in known.parts} == {
        "train.py:9": 512,
        "train.py:5": 64,
        None: 128,
    }
    alone = by_source(hold_at(step, 1), sources)
    assert {part.key and part.key.place: part.bytes for part in alone.parts} == {"train.py:5": 64, None: 640}


@pytest.fixture
def five_ops() -> Step:
    """Live bytes: 140, 170 (20 of them workspace), 190, 90, 50 over forward, forward, backward, backward, optimizer."""
    ops = [
        Op("aten.mm.default", module="fc", makes=["a"], reads=["w"], stack="/job/a.py:1:f"),
        Op("aten.relu.default", module="", makes=["b"], reads=["a"], workspace=20, stack="/job/a.py:2:f"),
        Op("aten.relu_backward.default", "backward", "", makes=["t"], reads=["b"], frees=["a"], stack="/job/a.py:2:f"),
        Op("aten.mm.default", "backward", "fc", frees=["b", "t"], reads=["b"]),
        Op("aten.add_.Tensor", "optimizer", makes=["m"], mutates=["w"]),
    ]
    storages = [
        Storage("w", 40, "parameter"),
        Storage("a", 100),
        Storage("b", 10),
        Storage("t", 40, "temporary"),
        Storage("m", 10, "optimizer_state"),
    ]
    return make_step(ops, storages)


def test_the_peak_names_what_runs_there(five_ops: Step) -> None:
    """190 bytes in backward; the root module has no name of its own, so its type is its title."""
    peak = find_peak(five_ops, find_sources(five_ops.stacks))
    assert (peak.op_id, peak.phase, peak.op, peak.allocated_bytes) == (2, "backward", "aten.relu_backward.default", 190)
    assert (peak.module, peak.module_title) == ("", "Model")
    assert peak.source is not None
    assert peak.source.place == "a.py:2"
    assert peak.describe() == "backward of Model (aten.relu_backward.default), a.py:2"


def test_each_phase_has_its_fullest_moment(five_ops: Step) -> None:
    """Phases that the step does not have are left out."""
    peaks = find_phase_peaks(five_ops, find_sources(five_ops.stacks))
    assert [(peak.phase, peak.op_id, peak.allocated_bytes) for peak in peaks] == [
        ("forward", 1, 170),
        ("backward", 2, 190),
        ("optimizer", 4, 50),
    ]
    assert peaks[2].module is None
    assert peaks[2].source is None
    assert peaks[2].describe() == "optimizer (aten.add_.Tensor)"


def test_each_category_has_its_own_maximum(five_ops: Step) -> None:
    """Workspace is highest in the second operator, independent of the total peak."""
    maxima = {name: (one.maximum_bytes, one.op_id) for name, one in find_category_maxima(five_ops).items()}
    assert maxima == {
        "parameter": (40, 0),
        "activation": (110, 1),
        "temporary": (40, 2),
        "optimizer_state": (10, 4),
        "workspace": (20, 1),
    }


@given(jobs())
def test_the_peak_is_the_fullest_of_the_phases(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """In every step of a random job, and no category's maximum can be above what was ever alive."""
    trace = make_trace(*job)
    for number in trace.recorded_steps:
        five_ops = trace.step(number)
        sources = find_sources(five_ops.stacks)
        peak = find_peak(five_ops, sources).allocated_bytes
        assert peak == live_bytes(five_ops).during.max()
        assert peak == max(moment.allocated_bytes for moment in find_phase_peaks(five_ops, sources))


def test_phases_stand_in_the_order_of_the_step() -> None:
    """Phases named by the job are included, ordered by their maxima."""
    phases = ("other", "evaluation", "saving", "rollout 2", "forward", "backward", "optimizer", "other")
    five_ops = make_step([Op(phase=phase, module="fc") for phase in phases], [Storage("w", 4)], [Module("fc")])
    peaks = find_phase_peaks(five_ops, find_sources(five_ops.stacks))
    assert [peak.phase for peak in peaks] == list(phases[:-1])
    assert peaks[3].describe() == "rollout 2 of fc (aten.mul.Tensor)"
