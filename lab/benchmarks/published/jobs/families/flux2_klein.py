"""FLUX.2-klein-base-4B from diffusers, with the other models and the adapters of PEFT's benchmark."""

from __future__ import annotations

import tomllib
from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from families.setting import expect_parameters
from peft import PeftConfig
from peft.tuners.boft import layer as boft
from torch import nn
from transformers import Dinov2Config, Dinov2Model, Qwen3Config, Qwen3ForCausalLM

TARGETS = [
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "to_qkv_mlp_proj",
    "linear_in",
    "linear_out",
]
FULL = "full-finetuning--flux2-klein-default"
#: Layers of the text encoder whose outputs are the prompt, in features one after another.
PROMPT_LAYERS = (10, 20, 30)
PROMPT_TOKENS = 512


def make_transformer() -> nn.Module:
    """Returns the model that is fine-tuned, of 3,875,544,576 parameters, in bf16 on the CPU."""
    model = Flux2Transformer2DModel(
        num_layers=5,
        num_single_layers=20,
        num_attention_heads=24,
        joint_attention_dim=7680,
        guidance_embeds=False,
    )
    expect_parameters(model, 3_875_544_576)
    return model.to(torch.bfloat16)


def make_text_encoder() -> nn.Module:
    """Returns Qwen3-4B in bf16 on the CPU."""
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


def make_autoencoder() -> nn.Module:
    """Returns the autoencoder of images in bf16 on the CPU."""
    return AutoencoderKLFlux2().to(torch.bfloat16).eval().requires_grad_(False)


def make_judge() -> nn.Module:
    """Returns DINOv2-base in float32, which the run keeps on the device to compare images with."""
    return Dinov2Model(Dinov2Config(image_size=518)).eval()


def leave_out_extension() -> None:
    """Lets BOFT train without its CUDA extension, as the published run did: its trained parameters are those.

    PEFT would try to compile it in each layer, and writes permutation matrices entry by entry.
    """
    boft.get_fbd_cuda = lambda: None
    boft.BOFTLayer.perm2mat = lambda self, indices: torch.eye(len(indices))[indices]


def make_adapter(name: str) -> PeftConfig:
    """Returns the settings of an adapter.

    Args:
        name: Of the experiment, with a name in flux2_adapters.toml.

    Raises:
        KeyError: There is none of that name.
    """
    text = (Path(__file__).parent / "flux2_adapters.toml").read_text(encoding="utf-8")
    settings = tomllib.loads(text)[name]
    targets = ["norm_q", "norm_k"] if settings["peft_type"] == "LN_TUNING" else TARGETS
    if settings["peft_type"] == "BOFT":
        leave_out_extension()
    modules = {"target_modules": targets}
    if settings["peft_type"] == "IA3":
        modules["feedforward_modules"] = targets
    return PeftConfig.from_peft_type(**settings, **modules)
