"""Planners on steps that policies have rewritten: each schedule is one that the step can run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from memprof.planners.find import find_plan
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.precision.policy import Precision
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace

LSTM = Path(__file__).parents[2] / "sample_traces" / "lstm" / "run.memprof"
#: The hidden state of the step before is freed in forward, once a cast of it exists; the second micro-batch reads what
#: the first has kept.
POLICIES = (Precision("bf16"), Accumulate(2))


@cache
def predicted(policy: Policy) -> Step:
    return policy.transform(Trace.open(LSTM).steady_step())


@pytest.mark.parametrize("planner", ["sqrt", "bptt", "chain", "dtr"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_schedule_of_a_predicted_step_is_one_of_the_step(policy: Policy, planner: str) -> None:
    """It is found, by the chain planner always, or its absence explained; its replay has the promised peak, and every
    tensor it reads is there.
    """
    step = predicted(policy)
    start, peak = step.bytes_at_start(), int(live_bytes(step).during.max())
    found = find_plan(step, start + (peak - start) * 8 // 10, planner=planner, time_limit_s=10)
    scheduled = found.scheduled()
    assert found.reason
    assert scheduled is not None or planner != "chain"
    if scheduled is not None:
        scheduled.check_lives()
        assert int(live_bytes(scheduled).during.max()) == found.schedule_peak_bytes
