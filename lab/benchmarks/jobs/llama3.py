"""Trains a language model of the sizes of Llama 3 on random words: too large for most machines, for dry runs.

Source of the sizes: Grattafiori et al., "The Llama 3 Herd of Models" (2024), table 3. Weights are fp32, products bf16.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, KEYS = 128256, 8


@dataclass(frozen=True)
class Size:
    """How large a model is."""

    layers: int
    width: int
    heads: int
    inner: int


SIZES = {
    "8b": Size(32, 4096, 32, 14336),
    "70b": Size(80, 8192, 64, 28672),
    "405b": Size(126, 16384, 128, 53248),
}


class Attention(nn.Module):
    """Attention with grouped keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.wq = nn.Linear(size.width, size.width, bias=False)
        self.wk = nn.Linear(size.width, KEYS * self.head, bias=False)
        self.wv = nn.Linear(size.width, KEYS * self.head, bias=False)
        self.wo = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, self.head).transpose(1, 2) for each in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.w1 = nn.Linear(size.width, size.inner, bias=False)
        self.w2 = nn.Linear(size.inner, size.width, bias=False)
        self.w3 = nn.Linear(size.width, size.inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """The model, without rotary embeddings, which hold next to nothing."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.output = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--length", type=int, default=8192)
    args = parser.parse_args()
    device = torch.device("cuda")
    model = Llama(SIZES[args.size]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for _ in range(4):
        tokens = torch.randint(VOCABULARY, (1, args.length + 1), device=device)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        del logits  # torchtitan holds none during backward either
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
