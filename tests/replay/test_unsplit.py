"""Bounds of what blocks that the allocator does not split add to a peak."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memprof.policies.allocator.policy import Allocator
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.interval import interval_of
from memprof.replay.allocator.events import replay
from memprof.replay.allocator.steps import requests_of_step
from memprof.replay.live import live_bytes
from memprof.replay.rounding import Unsplit
from memprof.trace.schema import NONE, Memory
from memprof.trace.step import Step
from tests.building import Op, Storage, make_step

MIB = 1 << 20


def on_cuda(step: Step, extra: dict[str, int] | None = None) -> Step:
    """Returns a step on a device, some of whose blocks are larger than requested.

    Args:
        step: The step, on the CPU.
        extra: Bytes by which a block is larger, by the name of its storage.
    """
    storages = step.storages
    more = np.array([(extra or {}).get(str(name), 0) for name in storages.name], dtype=np.int64)
    device = np.full(len(storages), "cuda:0", dtype=object)
    changed = storages.replace(device=device, allocated_bytes=storages.allocated_bytes + more)
    return dataclasses.replace(step, storages=changed, memory=Memory.empty())


def chain(sizes: list[int]) -> Step:
    """Forward keeps tensors of some sizes, backward frees them one by one and makes as large ones."""
    names = [f"x{place}" for place in range(len(sizes))]
    forward = [Op(makes=[name]) for name in names]
    backward = [Op(makes=[f"d{name}"], frees=[name, f"d{name}"], phase="backward") for name in reversed(names)]
    storages = [Storage("w", 8 * MIB, "parameter", name="w")]
    storages += [Storage(name, size, name=name) for name, size in zip(names, sizes, strict=True)]
    storages += [Storage(f"d{name}", size) for name, size in zip(names[::-1], sizes[::-1], strict=True)]
    return make_step(forward + backward, storages)


def test_by_hand() -> None:
    """Of two large blocks one is 1 MiB larger: half a MiB each, give or take as much; the weight does not count."""
    step = on_cuda(
        make_step([Op(makes=["x", "y"])], [Storage("x", 3 * MIB, name="x"), Storage("y", 5 * MIB)]), {"x": MIB}
    )
    unsplit = Unsplit.of(step)
    assert unsplit == Unsplit(MIB / 2, MIB / 2)
    assert unsplit.bounds_of_peak(step) == (8 * MIB, int(np.ceil(9 * MIB + 2 * 2**0.5 * MIB / 2)))


@pytest.mark.parametrize("device", ["cpu", "small"])
def test_only_large_blocks_of_a_device_are_not_split(device: str) -> None:
    step = make_step([Op(makes=["x"])], [Storage("x", 9 * MIB if device == "cpu" else MIB, name="x")])
    step = step if device == "cpu" else on_cuda(step, {"x": 512})
    assert Unsplit.of(step) == Unsplit(0.0, 0.0)
    assert Unsplit(MIB, MIB).bounds_of_peak(step) == (live_bytes(step).during.max(),) * 2


@pytest.mark.parametrize("seed", range(4))
def test_what_the_allocators_model_allocates_is_inside(seed: int) -> None:
    """A job of other sizes, of the same kind as the recorded one, through the model of the allocator."""
    rng = np.random.default_rng(seed)
    recorded, other = (chain((rng.integers(2200, 16000, 24) * 1024).tolist()) for _ in range(2))
    allocated = [_allocated(on_cuda(step)) for step in (recorded, other)]
    least, most = Unsplit.of(allocated[0]).bounds_of_peak(on_cuda(other))
    peak = int(live_bytes(allocated[1]).during.max())
    assert least <= peak <= most
    assert least < peak  # the model left blocks unsplit, or this shows nothing
    assert most < 1.1 * peak


def test_a_plan_on_a_device_has_an_interval() -> None:
    """Except with expandable segments, which split every block."""
    step = on_cuda(chain([3 * MIB, 5 * MIB]), {"x0": MIB // 2})
    found = interval_of((Checkpoint(("*",)),), (step,), (step,))
    peak = int(live_bytes(step).during.max())
    assert found.least_bytes == peak - MIB // 2
    assert found.most_bytes > peak
    assert interval_of((), (step,), (step,)).is_exact
    expandable = Allocator(expandable_segments=True)
    split = expandable.transform(step)
    assert interval_of((expandable,), (step,), (split,)).bounds == [peak - MIB // 2] * 2


def _allocated(step: Step) -> Step:
    """Returns a step with the sizes of the blocks that the model gives it."""
    issued = requests_of_step(step)
    blocks = replay(issued.requests).block_bytes
    is_storage = issued.storage_id != NONE
    sizes = step.storages.allocated_bytes.copy()
    sizes[issued.storage_id[is_storage]] = blocks[is_storage]  # of the last run
    return dataclasses.replace(step, storages=step.storages.replace(allocated_bytes=sizes))
