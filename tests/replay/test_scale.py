"""Where the time of a step goes, and times converted from one machine to another."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memprof.machines.catalogue import find_machine
from memprof.planners.graph.arrays import step_from_arrays
from memprof.replay.time import Rates, busiest_stream_us, op_cost_us, rates_of, rates_of_recording, scale_times
from memprof.trace.manifest import Machine, Speed
from memprof.trace.step import Step
from tests.building import Op, make_step

SLOW = Rates("slow", memory_bytes_per_us=100.0, flops_per_us={"fp32": 1000.0}, host_bytes_per_us=10.0, how="measured")


FAST = Rates(
    "fast", memory_bytes_per_us=400.0, flops_per_us={"fp32": 10_000.0, "bf16": 50_000.0}, host_bytes_per_us=20.0
)


def step(**columns: object) -> Step:
    """Three operators of 10 us each that make 100 bytes; the step takes 5 us more than they do."""
    made = step_from_arrays(
        time_us=[10.0, 10.0, 10.0], output_bytes=[100] * 3, inputs=[[], [0], [1]], is_backward=[False] * 3
    )
    ops = made.ops.replace(
        read_bytes=np.array([100, 100, 100]), written_bytes=np.array([100, 100, 100]), flops=np.array([0, 0, 0])
    )
    ops = ops.replace(**{name: np.array(values) for name, values in columns.items()})
    storages = made.storages.replace(dtype=np.full(len(made.storages), "float32", dtype=np.object_))
    return dataclasses.replace(made, ops=ops, storages=storages, duration_us=35.0)


def test_operators_bound_by_memory_scale_by_bandwidth() -> None:
    """Four times the bandwidth, a quarter of the time; what is not operators (5 us) stays."""
    there = scale_times(step(), SLOW, FAST)
    assert there.step.ops.duration_us.tolist() == [2.5, 2.5, 2.5]
    assert there.step.duration_us == 7.5 + 5.0
    assert (there.source, there.scaled_share) == ("modelled", 1.0)


def test_each_machine_has_its_own_bound() -> None:
    """A product may be bound by products here (10 us of them, 2 us of memory) and by memory there (0.5 us, not 0.4)."""
    there = scale_times(step(flops=[0, 10_000, 4_000]), SLOW, FAST)
    # Second: 10 us -> 1 us. Third: 4 us of products here, there 0.4 us of products and 0.5 us of memory.
    assert there.step.ops.duration_us.tolist() == pytest.approx([2.5, 1.0, 10.0 * 0.5 / 4.0])


def test_products_scale_by_the_rate_of_their_type() -> None:
    """A product of a type whose rate is unknown on either machine keeps its time, and is reported."""
    half = step(flops=[0, 10_000, 0])
    half = dataclasses.replace(
        half, storages=half.storages.replace(dtype=np.full(len(half.storages), "bfloat16", dtype=np.object_))
    )
    there = scale_times(half, SLOW, FAST)
    assert there.step.ops.duration_us.tolist() == [2.5, 10.0, 2.5]
    assert there.scaled_share == pytest.approx(2 / 3)
    assert "1 operators, 33.3 % of the time, have no known bound" in there.how


def test_copies_scale_by_the_link_and_collectives_do_not() -> None:
    """A copy to the host takes half over twice the link; what other ranks have a part in keeps its time."""
    there = scale_times(step(kind=np.array(["copy", "collective", "compute"], dtype=object)), SLOW, FAST)
    assert there.step.ops.duration_us.tolist() == [5.0, 10.0, 2.5]
    no_link = dataclasses.replace(FAST, host_bytes_per_us=0.0)
    there = scale_times(step(kind=np.array(["copy", "compute", "compute"], dtype=object)), SLOW, no_link)
    assert there.step.ops.duration_us.tolist() == [10.0, 2.5, 2.5]


def test_unknown_times_stay_unknown() -> None:
    """An operator without a time gets none."""
    there = scale_times(step(duration_us=[np.nan, 10.0, 10.0]), SLOW, FAST)
    assert np.isnan(there.step.ops.duration_us[0])
    assert there.step.ops.duration_us[1:].tolist() == [2.5, 2.5]


def test_same_machine_changes_nothing() -> None:
    """Scaled to the machine it was recorded on, a step is as it was."""
    recorded = step(flops=[0, 10_000, 0])
    there = scale_times(recorded, SLOW, SLOW)
    assert there.step.ops.duration_us.tolist() == recorded.ops.duration_us.tolist()
    assert there.step.duration_us == recorded.duration_us


def test_bytes_are_not_touched() -> None:
    """Another machine changes times alone."""
    recorded = step()
    there = scale_times(recorded, SLOW, FAST).step
    assert there.storages is recorded.storages
    assert np.array_equal(there.ops.workspace_bytes, recorded.ops.workspace_bytes)


def test_unknown_recording_machine_is_not_scaled() -> None:
    """A trace of an older memprof lacks its machine's speed: times stay as measured, with a note."""
    assert rates_of_recording(Machine(device_name="AMD EPYC")) is None
    recorded = step()
    there = scale_times(recorded, None, rates_of(find_machine("rtx3090")))
    assert there.step is recorded
    assert (there.source, there.scaled_share) == ("measured", 0.0)
    assert there.how.startswith("Times are those of the recording machine")


def test_measured_speed_goes_before_the_catalogue() -> None:
    """A machine's own measurement is taken where there is one, else what the catalogue has of its device."""
    h100 = Machine(device_name="NVIDIA H100 80GB HBM3", device_kind="cuda")
    known = rates_of_recording(h100)
    assert known is not None
    assert known.memory_bytes_per_us == 3_350_000
    speed = Speed(memory_bytes_per_us=2e6, to_host_bytes_per_us=5e4, from_host_bytes_per_us=4e4, fp32_flops_per_us=5e7)
    measured = rates_of_recording(dataclasses.replace(h100, speed=speed))
    assert measured is not None
    assert (measured.memory_bytes_per_us, measured.host_bytes_per_us) == (2e6, 4e4)
    assert measured.flops_per_us == {"fp32": 5e7}


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
