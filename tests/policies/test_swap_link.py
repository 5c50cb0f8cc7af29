"""Speed of swapped copies, the CPU's own work, and which device's memory is moved."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memprof.machines.catalogue import find_machine
from memprof.planners.graph.arrays import step_from_arrays
from memprof.policies.swap.copies import LAUNCH_US, Link, link_of, longer_us
from memprof.policies.swap.moves import Moves
from memprof.policies.swap.policy import DEFAULT_GBPS, Swap
from memprof.replay.time import Rates, rates_of, scale_times
from memprof.trace.manifest import Machine, Manifest, Speed
from memprof.trace.step import Step
from memprof.trace.store import Trace, write_trace
from tests.building import Tables

MEASURED = Speed(to_host_bytes_per_us=50_000.0, from_host_bytes_per_us=40_000.0)


def step_of(ops: int, duration_us: float) -> Step:
    """A step of so many operators on a device."""
    made = step_from_arrays(time_us=[1.0] * ops, output_bytes=[100] * ops, inputs=[[]] * ops, is_backward=[False] * ops)
    return dataclasses.replace(made, duration_us=duration_us)


def test_the_policys_speed_comes_first_then_what_was_measured() -> None:
    """A speed that was set counts, else that of the recording in each direction, else a usual one."""
    step = step_of(1, 1.0)
    usual = DEFAULT_GBPS["host"] * 1e3
    assert link_of(step, Swap()) == Link(usual, usual)
    measured = dataclasses.replace(step, to_host_bytes_per_us=50_000.0, from_host_bytes_per_us=40_000.0)
    assert link_of(measured, Swap()) == Link(50_000.0, 40_000.0)
    assert link_of(measured, Swap(gbps=10.0)) == Link(10_000.0, 10_000.0)
    disk = DEFAULT_GBPS["disk"] * 1e3
    assert link_of(measured, Swap(to="disk")) == Link(disk, disk)


@pytest.mark.parametrize(("kind", "expected"), [("cuda", (50_000.0, 40_000.0)), ("cpu", (0.0, 0.0))])
def test_a_recorded_step_knows_its_link(
    tmp_path: Path, small_tables: Tables, kind: str, expected: tuple[float, float]
) -> None:
    """What was measured when a job on a device ended is in its steps; copies within a CPU's memory are not."""
    path = tmp_path / "run.memprof"
    write_trace(path, [(Manifest(machine=Machine(device_kind=kind, speed=MEASURED)), small_tables)])
    step = Trace.open(path).steady_step()
    assert (step.to_host_bytes_per_us, step.from_host_bytes_per_us) == expected


def test_on_another_machine_its_link_counts() -> None:
    """A step whose times are modelled for another machine has that machine's link."""
    step = dataclasses.replace(step_of(3, 10.0), to_host_bytes_per_us=1.0, from_host_bytes_per_us=1.0)
    other = rates_of(find_machine("rtx3090"))
    there = scale_times(step, Rates("here", memory_bytes_per_us=1e5), other).step
    assert other.host_bytes_per_us > 0
    assert (there.to_host_bytes_per_us, there.from_host_bytes_per_us) == (other.host_bytes_per_us,) * 2


def test_beside_a_device_the_processors_work_hides() -> None:
    """1,000 operators of 8 us leave a step of 100 ms room for 92 ms of packing; on a processor all of it counts."""
    step = step_of(1000, 100_000.0)
    assert LAUNCH_US == 8.0
    assert longer_us(step, Swap(), work_us=92_000.0, waits_us=0.0) == 0.0
    assert longer_us(step, Swap(), work_us=120_000.0, waits_us=0.0) == pytest.approx(28_000.0)
    # While the device waits for copies, the processor goes on.
    assert longer_us(step, Swap(), work_us=120_000.0, waits_us=30_000.0) == pytest.approx(30_000.0)
    assert longer_us(step, Swap(to="disk"), work_us=120_000.0, waits_us=30_000.0) == 150_000.0


def test_a_step_that_waits_for_its_processor_has_no_room() -> None:
    """Where launching alone takes as long as the step, packing makes it longer by all it takes."""
    step = step_of(1000, 5_000.0)
    assert longer_us(step, Swap(), work_us=2_000.0, waits_us=0.0) == pytest.approx(2_000.0)


class Still:
    """A carrier that moves from one device and notes what is waited for."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.waited: list[int] = []

    def send(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes()

    def sent(self, place: int) -> bool:
        return True

    def fetch(self, place: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(place)

    def fetched(self, place: int) -> None:
        self.waited.append(place)

    def forget(self, place: int, storage: torch.UntypedStorage | None) -> None:
        pass


def test_only_its_own_device_is_moved_from() -> None:
    """Of a model over two devices, what lies on the other one stays there: its copy would come back on this one."""
    moves = Moves(Still("cuda:0"), 1, 1)
    with FakeTensorMode():
        assert moves.takes(torch.empty(8, device="cuda:0"))
        assert not moves.takes(torch.empty(8, device="cuda:1"))
        assert not moves.takes(torch.empty(8))


def test_everybody_who_needs_a_copy_waits_for_it() -> None:
    """The second to unpack a storage may compute on another stream than the first, so it waits for the copy too."""
    carrier = Still("cpu")
    moves = Moves(carrier, 0, 1)
    taken = moves.take(torch.zeros(8))
    moves.flush()
    assert taken.restored() is taken.restored()
    assert carrier.waited == [32, 32]


def test_copies_take_as_long_as_the_link_says() -> None:
    """Each direction has its own speed: 4,000,000 bytes take 80 us out at 50 GB/s and 100 us back at 40."""
    from tests.policies.faces import recorded

    step = recorded("gpt")
    on_device = dataclasses.replace(
        step,
        storages=step.storages.replace(device=np.full(len(step.storages), "cuda:0", dtype=object)),
        to_host_bytes_per_us=50_000.0,
        from_host_bytes_per_us=40_000.0,
    )
    ops = Swap(modules=("layers.*",), minimum_bytes=1 << 12).transform(on_device).ops
    for name, rate in (("memprof.swap_out", 50_000.0), ("memprof.swap_in", 40_000.0)):
        copies = ops.take(ops.name == name)
        assert len(copies)
        assert copies.duration_us == pytest.approx(copies.read_bytes / rate)
