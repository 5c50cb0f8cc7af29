"""Fine-tunes a language model with LitGPT on one A10G, and prints the peak of allocated bytes.

The argument is a name in SETTINGS: a file of LitGPT's config_hub/finetune. The data are random; batches are as long as
the longest sample of Alpaca may be, 512 tokens.

LitGPT of 2024, with which the figures were measured, did two things otherwise than today: RMSNorm multiplied by its
weight in bf16, and logits computed in chunks were not capped. Both are as they were.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import lightning as L
import litgpt.lora
import litgpt.model
import torch
from families.setting import report_peak
from litgpt.config import Config as PlainConfig
from litgpt.utils import chunked_cross_entropy

LENGTH = 512
#: Batches whose gradients are added up before each of two updates; the published runs add up as many or more.
STEPS, ACCUMULATED = 2, 2


@dataclass(frozen=True)
class Setting:
    """What a file of config_hub/finetune sets.

    Attributes:
        model: LitGPT's name.
        batch: Samples at a time.
        rank: Of LoRA; 0 trains all parameters.
        is_wide: LoRA is at every linear layer, not only at queries and values.
        dropout: Of LoRA.
    """

    model: str
    batch: int
    rank: int = 0
    is_wide: bool = False
    dropout: float = 0.05


SETTINGS = {
    "falcon-7b/lora": Setting("falcon-7b", 1, 32),
    "gemma-2b/lora": Setting("Gemma-2b", 2, 8, is_wide=True, dropout=0.1),
    "gemma2-2b/lora": Setting("Gemma-2-2b", 2, 8, is_wide=True, dropout=0.1),
    "llama-2-7b/lora": Setting("Llama-2-7b-hf", 2, 32),
    "llama-3-8b/lora": Setting("Llama-3-8B", 1, 32),
    "llama-3.2-1b/lora": Setting("Llama-3.2-1B", 1, 32),
    "llama-3.2-3b/full": Setting("Llama-3.2-3B", 4),
    "mistral-7b/lora": Setting("Mistral-7B-v0.1", 2, 32),
    "mistral-7b-v0.2/lora": Setting("Mistral-7B-v0.2", 2, 32),
    "phi-2/lora": Setting("phi-2", 4, 8, is_wide=True),
    "phi-3/lora": Setting("Phi-3-mini-4k-instruct", 4, 8, is_wide=True),
    "stablelm-base-alpha-3b/lora": Setting("stablelm-base-alpha-3b", 1, 32),
    "tiny-llama/full": Setting("tiny-llama-1.1b", 4),
    "tiny-llama/lora": Setting("tiny-llama-1.1b", 8, 32, is_wide=True),
}


def normalize(self: litgpt.model.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Forward of RMSNorm as of 2024: what autograd keeps for a trained weight has the input's type."""
    wide = x.float()
    scale = torch.rsqrt(torch.mean(wide * wide, dim=self.dim, keepdim=True) + self.eps)
    normed = (wide * scale).to(dtype=x.dtype)
    return normed * (1 + self.weight) if self.add_unit_offset else normed * self.weight


def main(name: str) -> None:
    """Validates twice, and trains."""
    setting = SETTINGS[name]
    litgpt.model.RMSNorm.forward = normalize
    fabric = L.Fabric(accelerator="cuda", devices=1, precision="bf16-true")
    fabric.launch()
    with fabric.init_module(empty_init=False):
        model = make_model(setting)
    model = fabric.setup_module(model) if setting.rank else fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95)))
    model.max_seq_length = LENGTH
    validate(fabric, model, setting.batch)
    model.config.final_logit_softcapping = None
    total = torch.tensor(0.0, device=fabric.device)
    for _ in range(STEPS):
        for _ in range(ACCUMULATED):
            tokens, targets = make_batch(fabric, model, setting.batch)
            if setting.rank:
                logits = model(tokens, lm_head_chunk_size=128)
                logits[-1] = logits[-1][..., :-1, :]
            else:
                logits = model(tokens)[..., :-1, :]
            loss = chunked_cross_entropy(logits, targets[..., 1:])
            fabric.backward(loss / ACCUMULATED)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    report_peak(allocated=torch.cuda.max_memory_allocated())


def make_model(setting: Setting) -> torch.nn.Module:
    """Returns LitGPT's model; with LoRA only its matrices are trained."""
    if not setting.rank:
        return litgpt.model.GPT(PlainConfig.from_name(setting.model))
    config = litgpt.lora.Config.from_name(
        setting.model,
        lora_r=setting.rank,
        lora_alpha=16,
        lora_dropout=setting.dropout,
        lora_query=True,
        lora_key=setting.is_wide,
        lora_value=True,
        lora_projection=setting.is_wide,
        lora_mlp=setting.is_wide,
        lora_head=setting.is_wide,
    )
    model = litgpt.lora.GPT(config)
    litgpt.lora.mark_only_lora_as_trainable(model)
    return model


@torch.no_grad()
def validate(fabric: L.Fabric, model: torch.nn.Module, batch: int) -> None:
    """Computes the losses of two batches, without chunks."""
    model.eval()
    losses = torch.zeros(2)
    for index in range(2):
        tokens, targets = make_batch(fabric, model, batch)
        logits = model(tokens)
        losses[index] = chunked_cross_entropy(logits[..., :-1, :], targets[..., 1:], chunk_size=0)
    model.train()


def make_batch(fabric: L.Fabric, model: torch.nn.Module, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and targets [sample, position]."""
    tokens = torch.randint(0, model.config.vocab_size, (batch, LENGTH))
    return fabric.to_device(tokens), fabric.to_device(tokens.clone())


if __name__ == "__main__":
    main(sys.argv[1])
