"""Emitted YAML has the keys of TRL, axolotl and ms-swift, and says what a plan says."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from memprof.emit.emission import Emitted, Request
from memprof.emit.registry import target_named
from memprof.policies.plan.plan_file import parse_plan

#: Keys that we write, as read in TRL 1.16 (SFTConfig and ModelConfig), axolotl 0.19.0 (utils/schemas, and the schema
#: of integrations/liger) and ms-swift 4.6.0 (trainers/arguments.py, arguments/base_args).
_OF_TRAINER = {
    "bf16", "fp16", "gradient_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "torch_compile",
}  # fmt: skip
KEYS = {
    "trl": {*_OF_TRAINER, "per_device_train_batch_size", "optim", "dtype", "loss_type", "fsdp", "fsdp_config"},
    "axolotl": {
        *_OF_TRAINER, "micro_batch_size", "optimizer", "bfloat16", "plugins", "liger_fused_linear_cross_entropy",
        "activation_offloading", "fsdp_version", "fsdp_config",
    },
    "ms-swift": {*_OF_TRAINER, "per_device_train_batch_size", "optim", "torch_dtype", "use_liger_kernel"},
}  # fmt: skip
ALL = (
    "[precision]\n[accumulate]\nmicro_batches = 2\n[loss]\n"
    "[checkpoint]\nmodules = ['layers.*']\n[swap]\nmodules = ['layers.*']"
)
PLANS = (
    ALL,
    "[precision]\nweights = 'bf16'\n[optimizer]\nstate = '8bit'\n[shard]\nstage = 3\nworld_size = 4",
    "[precision]\ndtype = 'fp16'\n[optimizer]\nloop = 'fused'\n[compile]\nmodules = ['.']\n[swap]\nto = 'disk'",
)


def emit(text: str, target: str, **request: Any) -> tuple[Emitted, dict[str, Any]]:
    emitted = target_named(target).emit(Request(parse_plan(text), "plan.toml", **request))
    return emitted, yaml.safe_load(emitted.text)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("target", KEYS)
def test_keys_are_the_trainers(target: str, plan: str) -> None:
    """Nothing is written under a name that the trainer would refuse."""
    emitted, settings = emit(plan, target, batch=16)
    assert settings
    assert set(settings) <= KEYS[target]
    assert emitted.text.startswith("# Trains under a memprof plan.\n")


def test_values_are_the_plans() -> None:
    """Batches are divided, layers recomputed with their inputs in host memory, and the logits are never whole."""
    common = {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    checkpointed = {"use_reentrant": False}
    _, trl = emit(ALL, "trl", batch=16)
    assert trl == {
        **common,
        "loss_type": "chunked_nll",
        "gradient_checkpointing_kwargs": {**checkpointed, "offload": True},
        "per_device_train_batch_size": 8,
    }
    _, axolotl = emit(ALL, "axolotl", batch=16)
    assert axolotl == {
        **common,
        "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        "liger_fused_linear_cross_entropy": True,
        "gradient_checkpointing_kwargs": checkpointed,
        "activation_offloading": "hidden_states",
        "micro_batch_size": 8,
    }
    emitted, swift = emit(ALL, "ms-swift", batch=16)
    assert swift == {
        **common,
        "use_liger_kernel": True,
        "gradient_checkpointing_kwargs": checkpointed,
        "per_device_train_batch_size": 8,
    }
    assert [sentence.partition(":")[0] for sentence in emitted.cannot] == ["swap activations of layers.* to host"]


def test_without_a_batch_the_division_is_left_to_the_reader() -> None:
    """The key is named, and what to divide by."""
    emitted, settings = emit(ALL, "axolotl")
    assert "micro_batch_size" not in settings
    assert any(note.startswith("micro_batch_size: divide yours by 2") for note in emitted.notes)


def test_offload_needs_recomputed_layers_in_trl() -> None:
    """transformers moves the inputs of recomputed layers, and nothing else."""
    emitted, _ = emit("[precision]\n[swap]\nmodules = ['layers.*']", "trl")
    assert any("only the inputs of recomputed layers" in sentence for sentence in emitted.cannot)


def test_training_arguments_move_what_goes_into_recomputed_layers() -> None:
    """The same argument of transformers 5, from its own target."""
    text = target_named("hf").emit(Request(parse_plan(ALL), "plan.toml")).text
    assert '"offload": True' in text
    assert "use_liger_kernel=True" in text
    plain = target_named("hf").emit(Request(parse_plan("[checkpoint]\nmodules = ['layers.*']"), "plan.toml")).text
    assert "offload" not in plain
