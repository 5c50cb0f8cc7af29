"""Allocator options: they reach the job's environment as torch reads it, and change nothing else."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from memprof.errors import PolicyError
from memprof.policies.allocator.policy import Allocator, merged_environment, parse_options
from memprof.policies.job import Job
from memprof.policies.plan import Plan
from tests.building import Op, Storage, make_step


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "sets no option"),
        ({"max_split_size_mb": 20}, "above 20"),
        ({"max_split_size_mb": 64.0}, "whole number of MiB"),
        ({"roundup_power2_divisions": 3}, "a power of two"),
        ({"roundup_power2_divisions": -2}, "a power of two"),
        ({"garbage_collection_threshold": 1.0}, "below 1"),
        ({"garbage_collection_threshold": -0.1}, "above 0"),
        ({"expandable_segments": 1}, "true or false"),
    ],
)
def test_what_torch_would_refuse_is_refused(settings: dict[str, Any], sentence: str) -> None:
    """Before the job starts, with a sentence that says what an option may be."""
    with pytest.raises(PolicyError, match=sentence):
        Allocator(**settings)


def test_the_flag_is_written_as_torchs_variable() -> None:
    """--allocator takes what people have in PYTORCH_ALLOC_CONF already."""
    assert Allocator.from_flag("expandable_segments") == Allocator(expandable_segments=True)
    assert Allocator.from_flag("max_split_size_mb:128,garbage_collection_threshold:0.8") == Allocator(
        max_split_size_mb=128, garbage_collection_threshold=0.8
    )
    with pytest.raises(PolicyError, match="knows no option 'max_split'"):
        Allocator.from_flag("max_split:128")
    with pytest.raises(PolicyError, match="cannot read 'large' as the value of max_split_size_mb"):
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


def test_torch_accepts_every_option() -> None:
    """Torch itself parses the text; it raises on what it does not know."""
    policy = Allocator(True, 64, 4, 0.8)
    text = ",".join(f"{key}:{value}" for key, value in policy.options().items())
    assert parse_options(text) == policy.options()
    command = f"import torch; torch._C._accelerator_setAllocatorSettings({text!r})"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_a_step_stays_as_it_is() -> None:
    """Allocated bytes do not depend on the options, and describe says that reserved bytes are not predicted."""
    step = make_step([Op(makes=["x"])], [Storage("x", 512)])
    policy = Allocator(expandable_segments=True)
    assert policy.transform(step) is step
    assert policy.describe() == "allocator expandable_segments (reserved bytes not predicted)"
    assert policy.source == "rule"


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
    assert job.notes == ["The allocator's options are set and do nothing on cpu: they are CUDA's."]
    job.undo()
