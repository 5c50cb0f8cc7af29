"""Emitted TrainingArguments are those of the installed transformers, and train under the plan."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import memprof
from memprof.emit.emission import Emitted, Request
from memprof.emit.registry import target_named
from memprof.policies.plan.plan_file import parse_plan
from memprof.replay.live import live_bytes
from tests.emit.running import recorded

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.ids = torch.randint(128, (32, 24), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[row], "labels": self.ids[row]}


def make_model() -> Any:
    """A Llama of three layers, drawn at random."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def emit(text: str, **request: Any) -> Emitted:
    return target_named("hf").emit(Request(parse_plan(text), "plan.toml", **request))


def scope_of(emitted: Emitted) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(compile(emitted.text, "under_plan.py", "exec"), scope)
    return scope


def own(folder: Path) -> dict[str, Any]:
    """What a user would ask for by himself."""
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    job = {"max_steps": 3, "learning_rate": 1e-3, "optim": "adamw_torch", "per_device_train_batch_size": 8}
    return {"output_dir": str(folder), "use_cpu": True, "seed": 0, **quiet, **job}


def train(model: Any, arguments: Any) -> tuple[list[float], int]:
    """Trains with Trainer; returns its losses and the peak of a recorded step."""
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Texts())
    trainer.remove_callback(transformers.PrinterCallback)
    step = recorded(trainer.train, 3)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, int(live_bytes(step).during.max())


def both(text: str, folder: Path) -> tuple[tuple[list[float], int], tuple[list[float], int]]:
    """Trains as emitted, and under the plan as memprof applies it."""
    emitted = emit(text)
    assert not emitted.cannot
    model, scope = make_model(), scope_of(emitted)
    if "prepare" in scope:
        scope["prepare"](model)
    found = train(model, scope["training_arguments"](**own(folder)))
    del model, scope
    gc.collect()
    model = make_model()
    job = memprof.apply(parse_plan(text), model)
    applied = train(model, transformers.TrainingArguments(**own(folder)))
    job.undo()
    return found, applied


def test_arguments_train_as_the_plan_does(tmp_path: Path) -> None:
    """Trainer's own bf16 and recomputation of every layer: the same losses, the same peak to the byte."""
    found, applied = both("[precision]\ndtype = 'bf16'\n[checkpoint]\nmodules = ['model.layers.*']", tmp_path)
    assert found == applied


@pytest.mark.slow  # the code around the model is that of test_pytorch.py
def test_what_has_no_argument_is_code_around_the_model(tmp_path: Path) -> None:
    """Some layers, and operators whose outputs stay: prepare(model) does it, to the byte."""
    text = "[checkpoint]\nmodules = ['model.layers.0', 'model.layers.*.mlp']\nkeep = ['matmul']"
    found, applied = both(text, tmp_path)
    assert found == applied


def test_parts_of_a_batch_and_the_form_of_updates_are_arguments(tmp_path: Path) -> None:
    """A batch of 8 in two parts is two of 4; if the batch is unknown, a note asks the reader to divide it."""
    text = "[accumulate]\nmicro_batches = 2\n[optimizer]\nloop = 'fused'"
    arguments = scope_of(emit(text, batch=8))["training_arguments"](**own(tmp_path))
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (4, 2)
    assert arguments.optim == "adamw_torch_fused"
    assert any("divide yours by 2" in note for note in emit(text).notes)


@pytest.mark.slow  # that the arguments are taken is held above
def test_parts_of_a_batch_add_up(tmp_path: Path) -> None:
    """Two micro-batches of four train as a batch of eight to rounding, in less memory."""
    arguments = scope_of(emit("[accumulate]\nmicro_batches = 2", batch=8))["training_arguments"](**own(tmp_path))
    losses, peak = train(make_model(), arguments)
    gc.collect()
    whole, whole_peak = train(make_model(), transformers.TrainingArguments(**own(tmp_path)))
    assert losses == pytest.approx(whole, abs=1e-5)
    assert peak < 0.8 * whole_peak


def test_shards_are_arguments_of_fsdp(tmp_path: Path) -> None:
    """FSDP2 with the plan's resharding, recomputation by FSDP itself; stage 0 is what torchrun does anyway."""
    emitted = emit("[shard]\nstage = 2\nworld_size = 2\n[checkpoint]\nmodules = ['model.layers.*']")
    arguments = scope_of(emitted)["training_arguments"](**own(tmp_path))
    assert arguments.fsdp_plugin_args["fsdp_version"] == 2
    assert arguments.fsdp_plugin_args["reshard_after_forward"] is False
    assert arguments.fsdp_plugin_args["activation_checkpointing"] is True
    assert not emit("[shard]\nstage = 0\nworld_size = 2").cannot
    assert "--to deepspeed" in emit("[shard]\nstage = 1\nworld_size = 2").cannot[0]


def test_only_what_is_there_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's options are set on import, after the user's own; there is nothing to prepare."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    emitted = emit("[allocator]\nexpandable_segments = true")
    assert "prepare" not in emitted.text
    assert "training_arguments" in scope_of(emitted)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:True"


def test_what_only_a_loop_could_do_is_said() -> None:
    """Nothing of these is in the file, and each has its reason."""
    swaps = "[[swap]]\nwhat = 'optimizer'\n[[swap]]\nwhat = 'parameters'\n"
    emitted = emit(f"[precision]\nweights = 'bf16'\n{swaps}[optimizer]\nin_backward = true")
    assert emitted.expressed == 0
    assert [sentence.split(":")[0] for sentence in emitted.cannot] == [
        "precision pure-bf16",
        "swap optimizer to host",
        "swap parameters to host",
        "optimizer in-backward",
    ]
