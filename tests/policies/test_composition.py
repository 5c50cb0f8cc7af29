"""Policies together: any subset, in their one order, replayed once."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.allocator.policy import Allocator
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compress.policy import Compress
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.registry import policy_types
from memprof.policies.shard.policy import Shard
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes, live_bytes_by_category, peak_op
from memprof.trace.schema import Table
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.policies.faces import compare, faces

SAMPLES = Path(__file__).parents[2] / "sample_traces"
REPEATED = {"gpt": ("layers.*",), "resnet": ("stages.*",), "lstm": ("lstm",)}
#: What is swapped and what is compressed: not the same, which is refused.
APART = {
    "gpt": (("layers.[0-1]",), ("layers.[2-9]",)),
    "resnet": (("stages.[0-2]",), ("stages.[3-9]", "stem")),
    "lstm": (("lstm",), ("embed", "dropout")),
}


@cache
def steady_step(sample: str) -> Step:
    return Trace.open(SAMPLES / sample / "run.memprof").steady_step()


def policies_for(sample: str) -> list[Policy]:
    """Lists one policy of every kind that can be predicted."""
    modules, (swapped, compressed) = REPEATED[sample], APART[sample]
    return [
        Shard(stage=3, world_size=4),
        Precision(dtype="bf16"),
        Accumulate(micro_batches=2),
        ChunkedLoss(chunks=4, minimum_bytes=1),
        Checkpoint(modules=modules),
        Swap(modules=swapped, to="disk"),
        Compress(modules=compressed),
        OptimizerPolicy(loop="foreach"),
        Allocator(expandable_segments=True),
    ]


@settings(max_examples=40, deadline=None)
@given(
    sample=st.sampled_from(sorted(REPEATED)),
    chosen=st.sets(st.integers(0, 8), min_size=1),
    order=st.randoms(use_true_random=False),
)
def test_any_subset_of_policies_makes_a_sound_step(sample: str, chosen: set[int], order: np.random.Generator) -> None:
    """Whatever is combined, in whatever order: the step holds its promises and its parts sum to the whole."""
    step = steady_step(sample)
    policies = [policy for number, policy in enumerate(policies_for(sample)) if number in chosen]
    plan = Plan(tuple(policies))
    order.shuffle(policies)
    assert Plan(tuple(policies)) == plan
    predicted, again = plan.transform(step), Plan(tuple(policies)).transform(step)
    predicted.check()
    peak = peak_op(predicted)
    during = live_bytes(predicted).during
    assert sum(values[peak] for values in live_bytes_by_category(predicted).values()) == during[peak]
    assert np.array_equal(live_bytes(again).during, during)
    assert during[peak] > 0
    assert np.isfinite(predicted.duration_us)
    assert predicted.duration_us > 0


@pytest.mark.parametrize("sample", REPEATED)
def test_a_prediction_leaves_the_recorded_step_as_it_is(sample: str) -> None:
    """Under each policy, to the last cell, so that the step can be asked again."""
    step = steady_step(sample)
    before = copy.deepcopy(step)
    others = [
        Precision(weights="bf16"),
        Precision(dtype="fp16"),
        Swap(what="optimizer", to="disk"),
        Swap(what="parameters", modules=REPEATED[sample], to="disk"),
        *(Shard(stage=stage, world_size=2) for stage in range(3)),
    ]
    for policy in [*policies_for(sample), *others]:
        policy.transform(step).check()
    for name, table in vars(before).items():
        if isinstance(table, Table):
            for column in table.columns():
                then, now = getattr(table, column.name), getattr(getattr(step, name), column.name)
                assert np.array_equal(now, then, equal_nan=now.dtype.kind == "f"), (name, column.name)


def test_every_policy_is_part_of_the_tests_above() -> None:
    """All there are but compile, whose step is measured, and remat, which refuses plans with swap and compress."""
    kinds = {type(policy) for policy in policies_for("gpt")}
    assert {kind.name for kind in policy_types()} - {kind.name for kind in kinds} == {"compile", "remat"}


def test_savings_do_not_add_up() -> None:
    """Where the peak has moved out of the layers, swapping them saves nothing more."""
    step = steady_step("gpt")

    def peak(*policies: Policy) -> int:
        return int(live_bytes(Plan(policies).transform(step)).during.max())

    checkpoint, precision = Checkpoint(modules=("layers.*",)), Precision(dtype="bf16")
    plain = peak()
    alone = (plain - peak(checkpoint)) + (plain - peak(precision))
    assert 0 < plain - peak(checkpoint, precision) < alone


COMBINED = [
    ("shared", (Checkpoint(modules=("mixer",)), OptimizerPolicy(in_backward=True))),
    ("unet", (Checkpoint(modules=("down.0",)), Swap(modules=("up.*",), to="disk"))),
]

#: Policies whose prediction is exact alone and so has no reason to miss together.
EXACT = [
    ("gpt", (Checkpoint(modules=("layers.*.mlp",)), Swap(modules=("layers.*",), to="disk"))),
    ("resnet", (Checkpoint(modules=("stages.1",)), Swap(modules=("stages.*",), to="disk"))),
    ("shared", (Checkpoint(modules=("mixer",)), Swap(modules=("mixer",), to="disk"))),
    ("unet", (Checkpoint(modules=("down.*", "up.*"), keep=("conv",)), Swap(to="disk"))),
]


@pytest.mark.parametrize(("job", "policies"), COMBINED, ids=[job for job, _ in COMBINED])
def test_a_combination_is_measured_as_predicted(job: str, policies: tuple[Policy, ...]) -> None:
    """The peak of a run under several policies lies within 3 % of the one predicted from the plain run."""
    predicted, measured = faces(job, Plan(policies))
    expected, found = int(live_bytes(predicted).during.max()), int(live_bytes(measured).during.max())
    assert abs(expected - found) <= 0.03 * found, compare(predicted, measured)


@pytest.mark.parametrize(("job", "policies"), EXACT, ids=[f"{job}{number}" for number, (job, _) in enumerate(EXACT)])
def test_what_goes_into_a_checkpointed_region_is_moved_too(job: str, policies: tuple[Policy, ...]) -> None:
    """A region's inputs leave when it begins and are back when it runs again: to the byte, wherever it lies."""
    predicted, measured = faces(job, Plan(policies))
    expected, found = int(live_bytes(predicted).during.max()), int(live_bytes(measured).during.max())
    assert expected == found, compare(predicted, measured)
