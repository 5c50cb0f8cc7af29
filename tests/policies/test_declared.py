"""What each policy declares about itself, and the settings that it accepts."""

from __future__ import annotations

import pytest

from memprof.errors import PolicyError
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import NUMERICS, SOURCES, Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.interval import time_interval_of
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
