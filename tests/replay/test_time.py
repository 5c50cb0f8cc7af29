"""Where the time of a step goes."""

from __future__ import annotations

import dataclasses

import pytest

from memprof.replay.time import busiest_stream_us, op_cost_us
from memprof.trace.step import Step
from tests.building import Op, make_step


def timed(*ops: Op, step_us: float) -> Step:
    return dataclasses.replace(make_step(list(ops), []), duration_us=step_us)


def test_streams_are_summed_apart() -> None:
    """Compute and copies have streams of their own; the executor's share is what the busiest leaves of the step."""
    step = timed(Op(duration_us=30), Op(duration_us=50), Op(duration_us=40, kind="copy"), step_us=100)
    step = dataclasses.replace(step, ops=step.ops.replace(stream=step.ops.op_id // 2))
    assert busiest_stream_us(step) == 80
    assert op_cost_us(step).tolist() == [37.5, 62.5, 50]


def test_an_operator_more_costs_its_executor_share() -> None:
    """In a step of 100 us whose operators take 80, an operator of 8 us costs 10; one of unknown time counts nothing."""
    step = timed(Op(duration_us=8), Op(duration_us=72), Op(duration_us=float("nan")), step_us=100)
    assert op_cost_us(step).tolist() == pytest.approx([10, 90, 0])


def test_operators_slower_than_their_step_cost_what_they_take() -> None:
    """Measured one by one operators may take longer than together: then nothing is added."""
    assert op_cost_us(timed(Op(duration_us=50), step_us=40)).tolist() == [50]


def test_memory_between_operators_takes_no_time() -> None:
    """Rows of kind allocation are not operators."""
    step = timed(Op(duration_us=10), Op(kind="allocation", duration_us=float("nan")), step_us=10)
    assert op_cost_us(step).tolist() == [10, 0]


def test_a_step_without_times() -> None:
    """Nothing is known, and nothing is claimed."""
    step = timed(Op(duration_us=float("nan")), step_us=10)
    assert busiest_stream_us(step) == 0
    assert op_cost_us(step).tolist() == [0]
