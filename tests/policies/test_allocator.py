"""Allocator options: they reach the job's environment as torch reads it, and change nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from memprof.errors import PolicyError
from memprof.policies.allocator.policy import Allocator, merged_environment
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.replay.live import live_bytes
from memprof.trace.schema import Memory
from memprof.trace.step import Step
from tests.building import Op, Storage, make_step

MIB = 1 << 20


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "no option set"),
        ({"max_split_size_mb": 20}, "above 20"),
        ({"max_split_size_mb": 64.0}, "whole number of MiB"),
        ({"roundup_power2_divisions": 3}, "a power of two"),
        ({"roundup_power2_divisions": -2}, "a power of two"),
        ({"garbage_collection_threshold": 1.0}, "below 1"),
        ({"garbage_collection_threshold": -0.1}, "above 0"),
        ({"expandable_segments": 1}, "true or false"),
        ({"pinned_max_cached_size_mb": -1}, "whole number of MiB"),
        ({"pinned_max_round_threshold_mb": 0.5}, "whole number of MiB"),
    ],
)
def test_what_torch_would_refuse_is_refused(settings: dict[str, Any], sentence: str) -> None:
    """Invalid options are refused before the job starts, with the valid ones."""
    with pytest.raises(PolicyError, match=sentence):
        Allocator(**settings)


def test_the_flag_is_written_as_torchs_variable() -> None:
    """--allocator takes what people have in PYTORCH_ALLOC_CONF already."""
    assert Allocator.from_flag("expandable_segments") == Allocator(expandable_segments=True)
    assert Allocator.from_flag("max_split_size_mb:128,garbage_collection_threshold:0.8") == Allocator(
        max_split_size_mb=128, garbage_collection_threshold=0.8
    )
    pinned = Allocator.from_flag("pinned_max_round_threshold_mb:128,pinned_max_cached_size_mb:256")
    assert pinned.options() == {"pinned_max_round_threshold_mb": "128", "pinned_max_cached_size_mb": "256"}
    with pytest.raises(PolicyError, match="unknown option 'max_split'"):
        Allocator.from_flag("max_split:128")
    with pytest.raises(PolicyError, match="invalid max_split_size_mb 'large'"):
        Allocator.from_flag("max_split_size_mb:large")


def test_options_are_added_to_those_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's other options stay, with their lists; of one name, the plan's stands."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2,>:4],max_split_size_mb:512")
    policy = Allocator(expandable_segments=True, max_split_size_mb=64)
    assert policy.environment() == {
        "PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2,>:4],max_split_size_mb:64,expandable_segments:True"
    }
    assert Plan((policy,)).environment() == policy.environment()
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    assert Allocator(expandable_segments=True).environment() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_the_old_variable_cannot_hide_the_options() -> None:
    """Torch 2.11 to 2.13 read PYTORCH_CUDA_ALLOC_CONF first, so where it is set both get the same text."""
    merged = merged_environment({"expandable_segments": "True"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"})
    assert (
        merged["PYTORCH_CUDA_ALLOC_CONF"] == merged["PYTORCH_ALLOC_CONF"] == "backend:native,expandable_segments:True"
    )


def test_on_a_cpu_a_step_stays_as_it_is() -> None:
    """The options are CUDA's: elsewhere they do nothing."""
    step = make_step([Op(makes=["x"])], [Storage("x", 512)])
    policy = Allocator(expandable_segments=True)
    assert policy.transform(step) is step
    assert policy.describe() == "allocator expandable_segments"
    assert policy.source == "replayed"


def on_cuda(step: Step) -> Step:
    device = np.full(len(step.storages), "cuda:0", dtype=object)
    empty = Memory.empty()
    return dataclasses.replace(step, storages=step.storages.replace(device=device), memory=empty)


def test_reserved_bytes_are_replayed_under_the_options() -> None:
    """By hand: 12 and 16 MiB take segments of 12 and 16; one that grows takes two pages of 20. The rest is the same."""
    step = on_cuda(make_step([Op(makes=["x"]), Op(makes=["y"])], [Storage("x", 12 * MIB), Storage("y", 16 * MIB)]))
    for policy, reserved in (
        (Allocator(max_split_size_mb=64), [12 * MIB, 28 * MIB]),
        (Allocator(expandable_segments=True), [20 * MIB, 40 * MIB]),
    ):
        predicted = policy.transform(step)
        predicted.check()
        # The second of the two runs, whose storages the first has left room for.
        assert predicted.memory.reserved_bytes.max() == reserved[-1]
        assert predicted.memory.allocated_bytes.tolist() == [12 * MIB, 28 * MIB]
        assert live_bytes(predicted).during.tolist() == live_bytes(step).during.tolist()


def test_rounding_to_steps_between_powers_of_two_is_allocated() -> None:
    """Of 17 MiB, two steps from 16 to 32 make 24: torch's counters of allocated bytes show that too."""
    step = on_cuda(make_step([Op(makes=["x"])], [Storage("x", 17 * MIB)]))
    predicted = Allocator(roundup_power2_divisions=2).transform(step)
    predicted.check()
    assert live_bytes(predicted).during.tolist() == [24 * MIB]


def test_memory_of_the_host_is_left_out() -> None:
    """What lies in main memory is not asked of the device's allocator, and still counts in the step."""
    step = make_step([Op(makes=["x", "y"])], [Storage("x", 12 * MIB), Storage("y", MIB)])
    device = np.array(["cuda:0", "cpu"], dtype=object)
    step = dataclasses.replace(step, storages=step.storages.replace(device=device), memory=Memory.empty())
    predicted = Allocator(expandable_segments=True).transform(step)
    predicted.check()
    assert predicted.memory.device.tolist() == ["cuda:0", "cpu"]
    assert predicted.memory.reserved_bytes.tolist() == [20 * MIB, -1]
    assert predicted.memory.allocated_bytes.tolist() == [12 * MIB, MIB]


def test_a_job_started_without_the_options_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applied in a running job it changes nothing and says with what to start it; started with them, that they work."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    policy = Allocator(expandable_segments=True, max_split_size_mb=64)
    job = Job(torch.nn.Linear(1, 1))
    policy.apply(job)
    assert "start the job with PYTORCH_ALLOC_CONF=expandable_segments:True" in job.notes[0]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", policy.environment()["PYTORCH_ALLOC_CONF"])
    job = Job(torch.nn.Linear(1, 1))
    policy.apply(job)
    assert job.notes == ["The allocator's options have no effect on cpu: they apply to CUDA only."]
    job.undo()
