"""Emitted JSON has DeepSpeed's keys, with the plan's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memprof.emit.emission import Emitted, Request
from memprof.emit.registry import target_named
from memprof.errors import UsageError
from memprof.policies.plan.plan_file import parse_plan

#: Keys of DeepSpeed 0.19.8 that we write, as read in deepspeed/runtime/config.py, zero/config.py,
#: zero/offload_config.py, precision_config.py, activation_checkpointing/config.py and constants.py.
KEYS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": {},
    "gradient_accumulation_steps": {},
    "zero_optimization": {"stage", "offload_optimizer", "offload_param"},
    "torch_autocast": {"enabled", "dtype"},
    "bf16": {"enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states"},
    "activation_checkpointing": {"partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"},
}
OFFLOAD_KEYS = {"device", "pin_memory", "nvme_path"}

PLANS = (
    "[shard]\nstage = 2\nworld_size = 4\n[precision]\ndtype = 'bf16'\n[accumulate]\nmicro_batches = 4",
    "[checkpoint]\nmodules = ['layers.*']\n[swap]\nmodules = ['layers.*']",
    "[precision]\nweights = 'bf16'\n[[swap]]\nwhat = 'optimizer'\n[[swap]]\nwhat = 'parameters'\nto = 'disk'",
    "[optimizer]\nstate = 'host'\n[precision]\ndtype = 'fp16'",
)


def emit(text: str, **request: Any) -> Emitted:
    return target_named("deepspeed").emit(Request(parse_plan(text), "plan.toml", **request))


@pytest.mark.parametrize("plan", PLANS)
def test_only_keys_of_deepspeed_are_written(plan: str) -> None:
    """Every key, and those inside of it, is one that DeepSpeed 0.19.8 reads."""
    config = json.loads(emit(plan, batch=16).text)
    for key, value in config.items():
        assert key in KEYS
        if isinstance(value, dict):
            assert value.keys() <= KEYS[key]
            for inner in value.values():
                assert not isinstance(inner, dict) or inner.keys() <= OFFLOAD_KEYS


@pytest.mark.parametrize("plan", PLANS)
def test_deepspeed_takes_what_is_written(plan: str, tmp_path: Path) -> None:
    """DeepSpeed's own class reads and checks the file, where DeepSpeed is installed."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    from deepspeed.runtime.config import DeepSpeedConfig

    path = tmp_path / "ds_config.json"
    path.write_text(emit(plan, batch=16).text)
    read = DeepSpeedConfig(str(path))
    assert read.zero_config.stage == json.loads(path.read_text()).get("zero_optimization", {}).get("stage", 0)


def test_the_plan_stands_in_the_keys() -> None:
    """ZeRO's stage, autocast in the plan's type, micro-batches of the batch that was given."""
    emitted = emit(PLANS[0], batch=16)
    assert json.loads(emitted.text) == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    }
    assert not emitted.cannot


def test_a_batch_that_is_not_known_is_left_to_who_fills_it_in() -> None:
    """ "auto" is not DeepSpeed's own, and that is said; a batch that cannot be divided evenly is refused."""
    emitted = emit(PLANS[0])
    assert json.loads(emitted.text)["train_micro_batch_size_per_gpu"] == "auto"
    assert any("deepspeed.initialize" in note for note in emitted.notes)
    with pytest.raises(UsageError, match="a batch of 18 cannot be split evenly into 4 micro-batches"):
        emit(PLANS[0], batch=18)


def test_offload_comes_with_the_stage_that_has_it() -> None:
    """Parameters leave in stage 3 alone: one rank is in it by name, and the note says so."""
    emitted = emit(PLANS[2])
    zero = json.loads(emitted.text)["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert zero["offload_param"]["device"] == "nvme"
    assert "stage 3 instead of none" in emitted.notes[0]


def test_modules_cannot_be_chosen_in_json() -> None:
    """How deepspeed.checkpointing works is set; that the model has to call it is said, and so is what has no key."""
    emitted = emit(PLANS[1])
    assert json.loads(emitted.text)["activation_checkpointing"]["cpu_checkpointing"] is True
    assert emitted.cannot[0].startswith("checkpoint layers.*: the JSON cannot select modules")
    emitted = emit(
        "[compress]\n[optimizer]\nloop = 'fused'\nin_backward = true\n[allocator]\nexpandable_segments = true"
    )
    assert not emitted.expressed
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in " ".join(emitted.cannot)
