"""Static plans: never below the bound, no overlaps, and in place where nothing else reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.replay.live import live_bytes
from memprof.replay.static.intervals import (
    Intervals,
    find_candidates,
    in_place,
    needed_lives,
    recorded_lives,
)
from memprof.replay.static.offsets import Placement, best_fit, greedy_by_size
from memprof.trace.operator_facts import bare_name
from memprof.trace.schema import NONE
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.building import Op, Storage, make_step

MIB = 1 << 20
SAMPLES = sorted(Path(__file__).parents[3].glob("sample_traces/*/run.memprof"))
PLANS = (greedy_by_size, best_fit)


def chain(layers: int, size: int = MIB) -> Step:
    """An inference step: each layer reads what the one before it made."""
    ops = [Op("aten.addmm.default", makes=["x0"])]
    ops += [Op("aten.addmm.default", reads=[f"x{n}"], makes=[f"x{n + 1}"], frees=[f"x{n}"]) for n in range(layers)]
    return make_step(ops, [Storage(f"x{n}", size) for n in range(layers + 1)])


def check(lives: Intervals, placed: Placement) -> None:
    """No two that live at once overlap, and the height is that of the highest."""
    ends = placed.offset + lives.size
    for row in range(len(lives)):
        meets = (lives.first <= lives.last[row]) & (lives.last >= lives.first[row])
        meets[row] = False
        assert not np.any(meets & (placed.offset < ends[row]) & (ends > placed.offset[row]))
    assert placed.height == ends.max(initial=0)
    assert placed.height >= lives.lower_bound()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layers", [1, 2, 9, 50])
def test_a_chain_needs_two_buffers(plan: Callable[[Intervals], Placement], layers: int) -> None:
    """Inference through N layers of one size takes two buffers, however many layers there are."""
    lives = needed_lives(chain(layers), "cpu")
    assert lives.lower_bound() == 2 * MIB
    assert plan(lives).height == 2 * MIB
    assert lives.total() == (layers + 1) * MIB


def test_a_chain_of_pointwise_operators_needs_one_buffer() -> None:
    """Each result takes its input's place: ten of eleven need no memory of their own."""
    ops = [Op("aten.randn.default", makes=["x0"])]
    ops += [Op("aten.relu.default", reads=[f"x{n}"], makes=[f"x{n + 1}"], frees=[f"x{n}"]) for n in range(10)]
    step = make_step(ops, [Storage(f"x{n}", MIB) for n in range(11)])
    lives = needed_lives(step, "cpu")
    candidates = find_candidates(step, lives)
    assert len(candidates) == 10
    joined = in_place(lives, candidates)
    assert (len(joined), joined.lower_bound(), greedy_by_size(joined).height) == (1, MIB, MIB)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("aten.mm.default", [], "a product reads its inputs more than once"),
        ("aten.relu.default", [Op(reads=["x"])], "another operator reads the input later"),
        ("aten.relu.default", [Op(reads=["weight"])], None),
    ],
)
def test_what_is_read_again_is_not_written_over(name: str, more: list[Op], why: str | None) -> None:
    """Weights, inputs of products and what is read later keep their place."""
    step = make_step(
        [
            Op(reads=["weight"], makes=["x"]),
            Op(name, reads=["x", "weight"], makes=["y"]),
            *more,
            Op(reads=["y"], frees=["x", "y"]),
        ],
        [Storage("weight", MIB, "parameter"), Storage("x", MIB), Storage("y", MIB)],
    )
    assert (len(find_candidates(step, needed_lives(step, "cpu"))) == 0) is (why is not None)


def test_a_planner_frees_at_the_last_use() -> None:
    """Python kept x to the end; the planner needs it during two operators only."""
    step = make_step(
        [Op(makes=["x"]), Op(reads=["x"], makes=["y"]), Op(reads=["y"], makes=["z"]), Op(frees=["x", "y", "z"])],
        [Storage(key, MIB) for key in "xyz"],
    )
    assert recorded_lives(step, "cpu").lower_bound() == 3 * MIB
    assert needed_lives(step, "cpu").lower_bound() == 2 * MIB


def test_best_fit_takes_the_smallest_gap() -> None:
    """Gaps of 3 and 1 units: a unit goes into the second for best fit; the height stays the bound."""
    unit = 512
    lives = Intervals(
        first=np.array([0, 0, 0, 0, 1]),
        last=np.array([0, 2, 0, 2, 1]),
        size=np.array([3, 1, 1, 1, 1]) * unit,
        storage_id=np.arange(5),
        is_fixed=np.zeros(5, dtype=np.bool_),
        ops=3,
    )
    placed = best_fit(lives)
    check(lives, placed)
    assert placed.height == lives.lower_bound() == 6 * unit


LIVES = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(1, 40), st.booleans()), min_size=0, max_size=30
)


@settings(max_examples=200, deadline=None)
@given(LIVES)
def test_no_two_live_storages_overlap(rows: list[tuple[int, int, int, bool]]) -> None:
    """Whatever the lives: both plans are valid, at least the bound and at most everything side by side."""
    fixed = np.array([row[3] for row in rows], dtype=np.bool_)
    first = np.array([row[0] for row in rows], dtype=np.int64)
    last = first + np.array([row[1] for row in rows], dtype=np.int64)
    lives = Intervals(
        first=np.where(fixed, 0, first),
        last=np.where(fixed, 28, last),
        size=512 * np.array([row[2] for row in rows], dtype=np.int64),
        storage_id=np.arange(len(rows)),
        is_fixed=fixed,
        ops=29,
    )
    for plan in PLANS:
        placed = plan(lives)
        check(lives, placed)
        assert placed.height <= lives.total()


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_sample_steps_are_planned_close_to_the_bound(path: Path) -> None:
    """On real training steps the largest first is within 2 % of the bound, and in place never needs more."""
    step = Trace.open(path).steady_step()
    lives = needed_lives(step, "cpu")
    placed = greedy_by_size(lives)
    check(lives, placed)
    assert placed.height <= 1.02 * lives.lower_bound()
    joined = in_place(lives, find_candidates(step, lives))
    check(joined, greedy_by_size(joined))
    assert joined.lower_bound() <= lives.lower_bound()
    assert joined.total() < lives.total()
    # Rounded to 512 bytes, the bound of recorded lives is the replayed peak.
    peak = int(live_bytes(step).during.max())
    assert peak <= recorded_lives(step, "cpu").lower_bound() <= peak + 512 * int(np.sum(lives.storage_id != NONE))


def test_operators_go_by_their_bare_names() -> None:
    """aten.add.Tensor and aten::add.Tensor are add."""
    assert bare_name("aten.add.Tensor") == bare_name("aten::add.Tensor") == "add"
    assert bare_name("mylib.fused.default") == "mylib"
