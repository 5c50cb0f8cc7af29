"""The bounds of a plan's step time."""

from __future__ import annotations

import math

import pytest

from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.interval import time_interval_of
from memprof.policies.precision.policy import Precision
from memprof.policies.remat.policy import Remat
from tests.building import Op, Storage, make_step


def test_errors_of_two_policies_add_up_as_independent_ones() -> None:
    """Each alone by its own errors; together by the root of the sum of their squares."""
    step = make_step([Op(makes=["a"])], [Storage("a", 64)])
    checkpoint, precision = Checkpoint.from_flag("*"), Precision.from_flag("bf16")
    assert checkpoint.time_errors_seen is not None
    assert precision.time_errors_seen is not None
    (a, b), (c, d) = checkpoint.time_errors_seen, precision.time_errors_seen
    alone = time_interval_of([checkpoint], step, 1000.0)
    both = time_interval_of([checkpoint, precision], step, 1000.0)
    assert alone is not None
    assert both is not None
    assert alone.bounds == pytest.approx([1000 * (1 - a), 1000 * (1 + b)])
    assert both.bounds == pytest.approx([1000 * (1 - math.hypot(a, c)), 1000 * (1 + math.hypot(b, d))])


def test_unmeasured_errors_give_no_bounds() -> None:
    """Neither without a policy, nor under one whose times were compared with no run."""
    step = make_step([Op(makes=["a"])], [Storage("a", 64)])
    assert time_interval_of([], step, 1000.0) is None
    assert time_interval_of([Checkpoint.from_flag("*"), Remat.from_flag("8GiB")], step, 1000.0) is None
    assert time_interval_of([Checkpoint.from_flag("*")], step, math.nan) is None
