"""Trainings that write a memory snapshot of all their steps: python snapshots.py MODEL PARTS SNAPSHOT.

PARTS is the number of micro-batches that each batch is divided into.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Attention over all positions, fused or written out."""

    def __init__(self, width: int, heads: int, *, is_fused: bool) -> None:
        """Creates the two linear layers."""
        super().__init__()
        self.heads, self.is_fused = heads, is_fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x, (batch, positions, width)."""
        batch, positions, width = x.shape
        heads = self.qkv(x).view(batch, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        if self.is_fused:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            weights = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(-1)
            mixed = functional.dropout(weights, 0.1) @ value
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return joined


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int, heads: int, *, is_fused: bool) -> None:
        """Creates norms, attention and MLP."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, is_fused=is_fused)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        x = x + self.attention(self.norm1(x))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """A language model of 8 layers."""

    def __init__(self) -> None:
        """Creates embedding, layers and head."""
        super().__init__()
        self.embedding = nn.Embedding(8192, 512)
        self.layers = nn.ModuleList(Block(512, 8, is_fused=True) for _ in range(8))
        self.head = nn.Linear(512, 8192, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of the next tokens y, both of shape (batch, positions)."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class ViT(nn.Module):
    """A classifier of 12 layers with written-out attention and dropout."""

    def __init__(self) -> None:
        """Creates patches, layers and head."""
        super().__init__()
        self.patches = nn.Conv2d(3, 384, 16, 16)
        self.layers = nn.Sequential(*(Block(384, 6, is_fused=False) for _ in range(12)))
        self.head = nn.Linear(384, 1000)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of images (batch, 3, 224, 224) and classes (batch,)."""
        x = self.layers(self.patches(x).flatten(2).transpose(1, 2))
        return functional.cross_entropy(self.head(x.mean(1)), y)


class Translator(nn.Module):
    """torch's own transformer, 4 layers of encoder and decoder each."""

    def __init__(self) -> None:
        """Creates embeddings, transformer and head."""
        super().__init__()
        self.source, self.target = nn.Embedding(10_000, 256), nn.Embedding(10_000, 256)
        self.transformer = nn.Transformer(256, 8, 4, 4, 1024, 0.1, batch_first=True)
        self.head = nn.Linear(256, 10_000)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of target tokens y, given source tokens x, both of shape (batch, positions)."""
        words = self.transformer(self.source(x), self.target(y))
        return functional.cross_entropy(self.head(words).flatten(0, 1), y.flatten())


def batch(name: str) -> tuple[Tensor, Tensor]:
    """Returns a batch of a model."""
    if name == "vit":
        return torch.randn(32, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (32,), device="cuda")
    sizes = {"gpt": (8, 512), "translator": (32, 100)}[name]
    words = torch.randint(0, 8192, sizes, device="cuda")
    return words, words.clone()


def main() -> None:
    """Trains three steps."""
    name, parts, snapshot = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.cuda.memory._record_memory_history()
    model = {"gpt": GPT, "vit": ViT, "translator": Translator}[name]().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        inputs, targets = batch(name)
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
