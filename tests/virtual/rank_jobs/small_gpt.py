"""A small language model, and what every job on several ranks does with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

WIDTH, HEADS, WORDS, LENGTH, BATCH, STEPS = 64, 4, 256, 64, 4, 7


class Block(nn.Module):
    """A layer, whose heads may be divided among ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds attention and a hidden layer; x is [batch, length, width]."""
        y = self.norm_1(x)
        heads = [
            each(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Embedding, layers and a head."""

    def __init__(self, layers: int = 4, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, length, words]."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def begin() -> torch.device:
    """Joins the process group as scripts for torchrun do; returns this rank's device."""
    rank, has_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(0)
    return torch.device("cuda", rank) if has_gpu else torch.device("cpu")


def draw(device: torch.device, batch: int = BATCH) -> torch.Tensor:
    """Returns random words, [batch, length]."""
    return torch.randint(WORDS, (batch, LENGTH), device=device)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy of logits with the words themselves."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def train(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
    after_step: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None,
    around: AbstractContextManager[object] | None = None,
    steps: int = STEPS,
) -> None:
    """Trains with AdamW, unless another optimizer is given, and leaves the process group."""
    optimizer = optimizer or torch.optim.AdamW(parameters, foreach=False)
    with around or nullcontext():
        for step in range(steps):
            ids = draw(device)
            loss_of(model(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(step, optimizer)
    dist.destroy_process_group()
