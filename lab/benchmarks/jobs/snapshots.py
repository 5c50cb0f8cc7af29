"""Trainings that write a memory snapshot of all their steps: python snapshots.py MODEL PARTS SNAPSHOT.

PARTS is the number of micro-batches that each batch is divided into.
"""

from __future__ import annotations

import sys

import torch
from models import Block, Decoder, Residual, ResNet, Vision
from torch import Tensor, nn
from torch.nn import functional


class Translator(nn.Module):
    """torch's own transformer, 4 layers of encoder and decoder each."""

    def __init__(self) -> None:
        """Creates embeddings, transformer and head."""
        super().__init__()
        self.source, self.target = nn.Embedding(10_000, 256), nn.Embedding(10_000, 256)
        self.transformer = nn.Transformer(256, 8, 4, 4, 1024, 0.1, batch_first=True)
        self.head = nn.Linear(256, 10_000)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns scores of target tokens y, given source tokens x, both of shape (batch, positions)."""
        scores: Tensor = self.head(self.transformer(self.source(x), self.target(y)))
        return scores


class Gated(nn.Module):
    """A layer with norms by root mean square, fused attention with shared keys, and a gated MLP, without biases."""

    def __init__(self, width: int, heads: int) -> None:
        """Creates norms, projections and MLP."""
        super().__init__()
        self.heads = heads
        self.scales = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.shared = nn.Linear(width, width // 2, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x, (batch, positions, width)."""
        batch, positions, width = x.shape
        y = self._norm(x, 0)
        query = self.query(y).view(batch, positions, self.heads, -1).transpose(1, 2)
        keys = self.shared(y).view(batch, positions, 2, self.heads // 4, -1).permute(2, 0, 3, 1, 4)
        key, value = keys.repeat_interleave(4, dim=2).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        y = self._norm(x, 1)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def _norm(self, x: Tensor, number: int) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scales[number]


MODELS = {
    "gpt": lambda: Decoder(8192, 512, [Block(512, 8) for _ in range(8)], has_norm=False, has_bias=False),
    "vit": lambda: Vision(384, [Block(384, 6, scores_dropout=0.1) for _ in range(12)], 16, 1000),
    "translator": Translator,
    "llama": lambda: Decoder(8192, 512, [Gated(512, 8) for _ in range(6)], has_norm=False, has_bias=False),
    "resnet": lambda: ResNet(nn.Conv2d(3, 128, 4, 4), [Residual(128) for _ in range(8)], 128, 1000),
}


def batch(name: str) -> tuple[Tensor, Tensor]:
    """Returns a batch of a model."""
    if name in ("vit", "resnet"):
        return torch.randn(32, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (32,), device="cuda")
    sizes = {"gpt": (8, 512), "llama": (8, 512), "translator": (32, 100)}[name]
    words = torch.randint(0, 8192, sizes, device="cuda")
    return words, words.clone()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Returns a batch's loss, the scores' last holder but for the graph."""
    scores = model(x, y) if isinstance(model, Translator) else model(x)
    return functional.cross_entropy(scores.flatten(0, -2), y.flatten())


def main() -> None:
    """Trains three steps."""
    name, parts, snapshot = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.cuda.memory._record_memory_history()
    model = MODELS[name]().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        inputs, targets = batch(name)
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
