"""Trains a language model of the sizes of GPT-3 on random words: too large for most machines, for dry runs.

Source of the sizes: Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1; the 13B model's width of
5,140, which its 40 heads do not divide, is 5,120 here. The 175B model's heads have 128 numbers each.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH = 50257, 2048


@dataclass(frozen=True)
class Size:
    """How large a model is."""

    layers: int
    width: int
    heads: int


SIZES = {
    "125m": Size(12, 768, 12),
    "1.3b": Size(24, 2048, 24),
    "2.7b": Size(32, 2560, 32),
    "6.7b": Size(32, 4096, 32),
    "13b": Size(40, 5120, 40),
    "175b": Size(96, 12288, 96),
}


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            each.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for each in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(LENGTH, size.width)
        self.layers = nn.ModuleList(Layer(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="13b")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    size = SIZES[args.size]
    if args.layers:
        size = Size(args.layers, size.width, size.heads)
    with torch.device(args.device):
        model = GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(args.steps):
        ids = torch.randint(VOCABULARY, (args.batch_size, LENGTH + 1), device=args.device)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
