"""Emitted files and settings of trainers: DeepSpeed, TRL, axolotl, ms-swift, and the page of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from memprof.emit.emission import Emitted, Request
from memprof.emit.registry import target_named
from memprof.emit.switches import switches_of
from memprof.errors import UsageError
from memprof.policies.plan.plan_file import parse_plan
from memprof.trace.step import Step
from tests.building import Op, Storage, make_step

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


#: Keys that we write, as read in TRL 1.16 (SFTConfig and ModelConfig), axolotl 0.19.0 (utils/schemas, and the schema
#: of integrations/liger) and ms-swift 4.6.0 (trainers/arguments.py, arguments/base_args).
_OF_TRAINER = {
    "bf16", "fp16", "gradient_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "torch_compile",
}  # fmt: skip


YAML_KEYS = {
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


YAML_PLANS = (
    ALL,
    "[precision]\nweights = 'bf16'\n[optimizer]\nstate = '8bit'\n[shard]\nstage = 3\nworld_size = 4",
    "[precision]\ndtype = 'fp16'\n[optimizer]\nloop = 'fused'\n[compile]\nmodules = ['.']\n[swap]\nto = 'disk'",
)


def emit_yaml(text: str, target: str, **request: Any) -> tuple[Emitted, dict[str, Any]]:
    emitted = target_named(target).emit(Request(parse_plan(text), "plan.toml", **request))
    return emitted, yaml.safe_load(emitted.text)


@pytest.mark.parametrize("plan", YAML_PLANS)
@pytest.mark.parametrize("target", YAML_KEYS)
def test_keys_are_the_trainers(target: str, plan: str) -> None:
    """Nothing is written under a name that the trainer would refuse."""
    emitted, settings = emit_yaml(plan, target, batch=16)
    assert settings
    assert set(settings) <= YAML_KEYS[target]
    assert emitted.text.startswith("# Trains under a memprof plan.\n")


def test_values_are_the_plans() -> None:
    """Batches are divided, layers recomputed with their inputs in host memory, and the logits are never whole."""
    common = {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    checkpointed = {"use_reentrant": False}
    _, trl = emit_yaml(ALL, "trl", batch=16)
    assert trl == {
        **common,
        "loss_type": "chunked_nll",
        "gradient_checkpointing_kwargs": {**checkpointed, "offload": True},
        "per_device_train_batch_size": 8,
    }
    _, axolotl = emit_yaml(ALL, "axolotl", batch=16)
    assert axolotl == {
        **common,
        "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        "liger_fused_linear_cross_entropy": True,
        "gradient_checkpointing_kwargs": checkpointed,
        "activation_offloading": "hidden_states",
        "micro_batch_size": 8,
    }
    emitted, swift = emit_yaml(ALL, "ms-swift", batch=16)
    assert swift == {
        **common,
        "use_liger_kernel": True,
        "gradient_checkpointing_kwargs": checkpointed,
        "per_device_train_batch_size": 8,
    }
    assert [sentence.partition(":")[0] for sentence in emitted.cannot] == ["swap activations of layers.* to host"]


def test_without_a_batch_the_division_is_left_to_the_reader() -> None:
    """The key is named, and what to divide by."""
    emitted, settings = emit_yaml(ALL, "axolotl")
    assert "micro_batch_size" not in settings
    assert any(note.startswith("micro_batch_size: divide yours by 2") for note in emitted.notes)


def test_offload_needs_recomputed_layers_in_trl() -> None:
    """transformers moves the inputs of recomputed layers, and nothing else."""
    emitted, _ = emit_yaml("[precision]\n[swap]\nmodules = ['layers.*']", "trl")
    assert any("only the inputs of recomputed layers" in sentence for sentence in emitted.cannot)


def test_training_arguments_move_what_goes_into_recomputed_layers() -> None:
    """The same argument of transformers 5, from its own target."""
    text = target_named("hf").emit(Request(parse_plan(ALL), "plan.toml")).text
    assert '"offload": True' in text
    assert "use_liger_kernel=True" in text
    plain = target_named("hf").emit(Request(parse_plan("[checkpoint]\nmodules = ['layers.*']"), "plan.toml")).text
    assert "offload" not in plain


_TRAINER = "/site-packages/transformers/trainer.py:2164:compute_loss"


def step_in(*frames: str) -> Step:
    """Returns a step whose one operator runs below these frames, innermost first."""
    return make_step([Op(makes=["x"], stack="\n".join(("model.py:3:forward", *frames)))], [Storage("x", 4)])


@pytest.mark.parametrize(
    ("frames", "target", "words"),
    [
        (
            (_TRAINER, "train.py:9:<module>"),
            "hf",
            (
                "TrainingArguments: bf16=True, activation_checkpointing=True, "
                "activation_checkpointing_kwargs={'offload': True}"
            ),
        ),
        (
            ("/site-packages/trl/trainer/sft_trainer.py:1420:training_step", _TRAINER, "train.py:9:<module>"),
            "trl",
            (
                "SFTConfig: bf16=True, gradient_checkpointing=True, "
                "gradient_checkpointing_kwargs={'use_reentrant': False, 'offload': True}"
            ),
        ),
        (
            ("/site-packages/lightning/pytorch/loops/fit_loop.py:240:advance",),
            "lightning",
            'Lightning\'s Trainer: precision="bf16-mixed"',
        ),
    ],
)
def test_settings_are_those_of_the_trainer_that_ran(frames: tuple[str, ...], target: str, words: str) -> None:
    """TRL's trainer runs inside transformers' and goes first; what a trainer has no setting for is not named."""
    plan = parse_plan("[precision]\n[checkpoint]\nmodules = ['layers.*']\n[swap]\nmodules = ['layers.*']")
    found = switches_of(step_in(*frames), plan)
    assert found is not None
    assert (found.target, found.words) == (target, words)


def test_a_loop_of_ones_own_has_no_settings() -> None:
    """Nothing is named either where a trainer has no setting for any of the plan's policies."""
    assert switches_of(step_in("train.py:9:<module>"), parse_plan("[precision]")) is None
    some = parse_plan("[checkpoint]\nmodules = ['layers.0']")
    assert switches_of(step_in(_TRAINER), some) is None
