"""What each policy declares, the settings that it accepts, and patterns of module names."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.errors import PolicyError
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import NUMERICS, SOURCES, Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.interval import time_interval_of
from memprof.policies.plan.patterns import condensed, match_modules, outermost
from memprof.policies.plan.plan import Plan
from memprof.policies.registry import policy_types
from memprof.policies.remat.policy import Remat
from memprof.policies.shard.policy import Shard
from memprof.policies.swap.records import find_records
from tests.building import Op, Storage, make_step


@pytest.mark.parametrize("kind", policy_types(), ids=lambda kind: kind.name)
def test_a_policy_declares_its_effect_and_its_errors(kind: type[Policy]) -> None:
    """The values are among those that pages have words for, and errors are shares below 1."""
    policy = kind.from_flag(kind.flag_example.strip("'"))
    assert kind.__module__ == f"memprof.policies.{policy.name}.policy"
    assert policy.numerics in NUMERICS
    assert policy.source in SOURCES
    for errors in (policy.errors_seen, policy.errors_combined, policy.time_errors_seen or (0.0, 0.0)):
        assert len(errors) == 2
        assert all(0 <= error < 1 for error in errors)
    assert policy.describe().startswith(("swap", kind.name, "precision"))


def test_times_of_micro_batches_have_bounds() -> None:
    """They are estimates: a step of 1 ms lasts from 0.7 to 1.5 ms."""
    step = make_step([Op(makes=["a"])], [Storage("a", 64)])
    interval = time_interval_of([Accumulate(2)], step, 1000.0)
    assert interval is not None
    assert interval.bounds == pytest.approx([700.0, 1500.0])


@pytest.mark.parametrize("heuristic", ["", "MSPS", "lru", "full"])
def test_remat_refuses_other_heuristics(heuristic: str) -> None:
    """The message lists the valid ones."""
    with pytest.raises(PolicyError, match="write eq-class or msps"):
        Remat(budget="8GiB", heuristic=heuristic)


@pytest.mark.parametrize("stage", [-1, 4, True, "1", 1.0])
def test_shard_refuses_other_stages(stage: object) -> None:
    """A stage is a whole number from 0 to 3."""
    with pytest.raises(PolicyError, match="invalid stage"):
        Shard(stage=stage, world_size=2)  # type: ignore[arg-type]


def test_an_update_in_backward_needs_an_optimizer() -> None:
    """So does every form of the update; a checkpoint needs none."""
    assert OptimizerPolicy.from_flag("in-backward").needs_optimizer
    assert not Checkpoint.from_flag("layers.*").needs_optimizer


@pytest.mark.parametrize(
    ("dtype", "is_moved"),
    [
        *((dtype, True) for dtype in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8")),
        *((dtype, True) for dtype in ("uint8", "bool")),
        *((dtype, False) for dtype in ("complex64", "quint8", "float8_e4m3fn")),
    ],
)
def test_swap_moves_saved_tensors_of_plain_types(dtype: str, *, is_moved: bool) -> None:
    """Such as the masks of dropout, which are truth values; others stay where they are."""
    step = make_step(
        [
            Op("aten.native_dropout.default", module="layer", reads=["x"], makes=["y", "mask"], saves=["mask"]),
            Op("aten.sum.default", reads=["y"], makes=["loss"]),
            Op("aten.mul.Tensor", "backward", "layer", reads=["mask"], makes=["g"], frees=["mask"], forward=0),
        ],
        [
            Storage("x", 64, "input"),
            *(Storage(key, 64) for key in ("y", "loss", "g")),
            Storage("mask", 4096, dtype=dtype),
        ],
    )
    moved = find_records(step, ["layer"], 1).storage
    assert [int(step.storages.allocated_bytes[one]) for one in moved] == ([4096] if is_moved else [])


def test_a_prediction_names_the_recording_it_was_given() -> None:
    """Without a name it has none."""
    step = make_step([Op(makes=["a"])], [Storage("a", 64)])
    assert Plan().predict(step)[0].prediction.trace == ""  # type: ignore[union-attr]
    assert Plan().predict(step, trace="run.memprof")[0].prediction.trace == "run.memprof"  # type: ignore[union-attr]


NAMES = ["", "embed", "layers", "layers.0", "layers.0.mlp", "layers.0.mlp.0", "layers.1", "layers.10", "layers.10.mlp"]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("embed", ["embed"]),
        ("layers.*", ["layers.0", "layers.1", "layers.10"]),
        ("layers.?", ["layers.0", "layers.1"]),
        ("layers.[0-1]", ["layers.0", "layers.1"]),
        ("layers.[!0]", ["layers.1"]),
        ("layers.*.mlp", ["layers.0.mlp", "layers.10.mlp"]),
        ("**.mlp", ["layers.0.mlp", "layers.10.mlp"]),
        ("**.embed", ["embed"]),
        ("layers.**", ["layers.0", "layers.0.mlp", "layers.0.mlp.0", "layers.1", "layers.10", "layers.10.mlp"]),
        ("*", ["embed", "layers"]),
        ("**", NAMES[1:]),
        ("", [""]),
        (".", [""]),
    ],
)
def test_stars_know_of_dots(pattern: str, matched: list[str]) -> None:
    """One star and a question mark stay within a part of the name, two stars span parts; a dot is the model itself."""
    assert match_modules([pattern], NAMES) == matched


def test_a_name_is_chosen_once_and_in_the_models_order() -> None:
    """However many patterns match it, in whatever order they are given."""
    assert match_modules(["layers.1", "layers.?"], NAMES) == ["layers.0", "layers.1"]


def test_a_pattern_without_a_match_names_near_ones() -> None:
    """Each pattern must match something: a typing error would else leave a plan half applied."""
    with pytest.raises(PolicyError, match=r"no module of the model matches 'layer\.0'; did you mean layers\.0"):
        match_modules(["embed", "layer.0"], NAMES)
    with pytest.raises(PolicyError, match=r"matches 'zzz'; it has embed, layers, layers\.\*"):
        match_modules(["zzz"], NAMES)
    with pytest.raises(PolicyError, match="no modules"):
        match_modules(["x"], [])


@given(st.text(alphabet="ab.*?[]!-^\\()+$|", max_size=8))
def test_any_text_is_a_pattern(pattern: str) -> None:
    """Any pattern results in names or an error message."""
    with contextlib.suppress(PolicyError):
        assert set(match_modules([pattern], NAMES)) <= set(NAMES)


def test_what_lies_inside_another_is_left_out() -> None:
    """A module inside a chosen one is part of it."""
    assert outermost(["layers.0", "layers.0.mlp", "layers.10.mlp", "layers.1"]) == [
        "layers.0",
        "layers.10.mlp",
        "layers.1",
    ]
    assert outermost(["", "embed"]) == [""]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (("layers.0", "layers.1", "layers.2", "head"), "layers.0-2, head"),
        (("layers.9", "layers.10", "layers.11.mlp"), "layers.9-10, layers.11.mlp"),
        (("a.0.mlp", "a.1.mlp", "a.3.mlp"), "a.{0-1,3}.mlp"),
        (("stages.1", "stages.0"), "stages.0-1"),
        (("0", "1"), "0-1"),
        (("a.0.b.2", "a.1.b.2", "a.3.b.2", "a.3.b.3"), "a.{0-1,3}.b.2, a.3.b.3"),
        (("layers.*", "**.norm"), "layers.*, **.norm"),
        ((".",), "the whole model"),
        (("h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "h.2.mlp", "head"), "h.0-1.attn, h.0-2.mlp, head"),
        (("0.0", "0.1", "1.0", "1.1"), "0.0-1, 1.0-1"),
        ((), ""),
    ],
)
def test_names_that_count_up_are_said_in_one(patterns: tuple[str, ...], words: str) -> None:
    """In any order, and also where others stand between them."""
    assert condensed(patterns) == words
