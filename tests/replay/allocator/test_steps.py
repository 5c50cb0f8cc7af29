"""A step as requests: what a training step reserves, from its allocations, frees and workspaces."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.replay.allocator.events import ALLOCATE, replay
from memprof.replay.allocator.rules import Settings
from memprof.replay.allocator.steps import RUNS, requests_of_step, requests_of_steps, reserved_by_op
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE
from memprof.trace.step import Step
from tests.building import Op, Storage, make_step

MIB = 1 << 20


def two_layers() -> Step:
    """A weight, an old gradient that goes, two activations, and a gradient that stays."""
    return make_step(
        [
            Op(reads=["weight"], makes=["a"], frees=["old"]),
            Op(reads=["a"], makes=["b"], workspace=30 * MIB),
            Op(reads=["b"], makes=["new"], frees=["a", "b"], phase="backward"),
        ],
        [
            Storage("weight", 12 * MIB, "parameter", name="weight"),
            Storage("old", 12 * MIB, "gradient", name="weight"),
            Storage("a", 16 * MIB),
            Storage("b", 18 * MIB),
            Storage("new", 12 * MIB, "gradient", name="weight"),
        ],
    )


def test_requests_follow_births_workspaces_and_deaths() -> None:
    """Outputs come first, then the workspace is allocated and freed, then storages that end with the operator."""
    step = two_layers()
    asked = requests_of_step(step)
    subjects = [
        "workspace"
        if asked.storage_id[one] == NONE
        else int(step.storages.requested_bytes[asked.storage_id[one]] / MIB)
        for one in asked.requests.allocation.tolist()
    ]
    kinds = ["+" if kind == ALLOCATE else "-" for kind in asked.requests.kind.tolist()]
    first = ["+16", "-12", "+18", "+workspace", "-workspace", "+12", "-16", "-18"]
    written = [f"{kind}{subject}" for kind, subject in zip(kinds, subjects, strict=True)]
    assert written == ["+12", "+12", *first * RUNS]
    assert asked.steady_from == 2 + 8 * (RUNS - 1)


def test_the_first_update_makes_the_state_of_the_optimizer() -> None:
    """Later steps find it there; a job that starts has none, so its blocks lie among those of the first step."""
    step = make_step(
        [Op(makes=["a"]), Op(makes=["b"], phase="backward", frees=["a"]), Op(phase="optimizer", frees=["b"])],
        [
            Storage("weight", MIB, "parameter"),
            Storage("state", 2 * MIB, "optimizer_state"),
            Storage("a", 3 * MIB),
            Storage("b", 4 * MIB),
        ],
    )
    asked = requests_of_step(step)
    sizes = (asked.requests.size[asked.requests.allocation] / MIB).astype(int).tolist()
    assert sizes == [1, 3, 4, 3, 2, 4, *[3, 4, 3, 4] * (RUNS - 1)]
    assert asked.op_id.tolist()[:6] == [NONE, 0, 1, 1, 2, 2]


def test_the_second_run_frees_what_the_first_left() -> None:
    """The gradient that the first run leaves is the old one of the second: nothing piles up."""
    asked = requests_of_step(two_layers())
    done = replay(asked.requests)
    assert done.allocated()[-1] == done.allocated()[asked.steady_from - 1] == 24 * MIB
    assert int(done.allocated().max()) == int(live_bytes(two_layers()).during.max())


def test_reserved_bytes_by_operator() -> None:
    """By hand: 12 + 12 for weights and gradients, 16, 18 and 30 for the step; nothing is ever released."""
    curve = reserved_by_op(two_layers())
    assert curve.shape == (3,)
    assert curve.max() == (12 + 12 + 16 + 18 + 30) * MIB
    assert (curve >= live_bytes(two_layers()).during).all()


def test_expandable_segments_need_no_more_than_whole_pages() -> None:
    """What is alive at most, rounded up to pages of 20 MiB, and one page for what does not line up."""
    peak = int(live_bytes(two_layers()).during.max())
    reserved = int(replay(requests_of_step(two_layers()).requests, Settings(expandable_segments=True)).reserved().max())
    assert peak <= reserved <= peak + 40 * MIB


def test_a_step_without_memory_asks_for_nothing() -> None:
    """Operators that make nothing reserve nothing."""
    assert reserved_by_op(make_step([Op()], [])).tolist() == [0]


def test_steps_of_several_sizes_follow_each_other() -> None:
    """What a step leaves is freed by the next at the size that it was made in; segments of other sizes pile up."""
    step = two_layers()
    larger = dataclasses.replace(
        step, storages=step.storages.replace(requested_bytes=step.storages.requested_bytes * [1, 2, 2, 2, 2])
    )
    asked = requests_of_steps([step, larger, step])
    done = replay(asked.requests)
    assert done.allocated()[-1] == 24 * MIB
    assert int(done.allocated().max()) > int(live_bytes(two_layers()).during.max())
    alone = max(int(replay(requests_of_step(one).requests).reserved().max()) for one in (step, larger))
    assert int(done.reserved().max()) >= alone
    with pytest.raises(ValueError, match="same operators and storages"):
        requests_of_steps([step, make_step([Op()], [])])
