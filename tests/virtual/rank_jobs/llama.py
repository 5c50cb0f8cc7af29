"""A Llama 3 of 8 billion parameters, on one device, or on several with fully_shard: ``[--checkpoint] [--offload]``."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import functional

LAYERS, WIDTH, HEADS, GROUPS, INNER, WORDS, LENGTH = 32, 4096, 32, 8, 14336, 128256, 8192
SIZE = WIDTH // HEADS


class Attention(nn.Module):
    """Attention whose keys and values are shared by groups of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, GROUPS * SIZE, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the heads' values, mixed; x is [batch, length, width]."""
        heads = [each(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds attention and a gated layer."""
        x = x + self.attention(self.norm_1(x))
        y = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, length, words]."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


is_distributed = "WORLD_SIZE" in os.environ
if is_distributed:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
with torch.device("meta" if is_distributed else "cuda"):
    model = Llama()
if "--checkpoint" in sys.argv:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
if is_distributed:
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    place = CPUOffloadPolicy() if "--offload" in sys.argv else OffloadPolicy()
    for layer in model.layers:
        fully_shard(layer, mp_policy=mixed, offload_policy=place)
    fully_shard(model, mp_policy=mixed, offload_policy=place)
    model.to_empty(device="cpu" if "--offload" in sys.argv else "cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for _ in range(4):
    ids = torch.randint(WORDS, (1, LENGTH + 1), device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=not is_distributed):
        logits = model(ids[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
