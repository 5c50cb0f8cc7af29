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


class Llama(nn.Module):
    """A language model of 6 gated layers."""

    def __init__(self) -> None:
        """Creates embedding, layers and head."""
        super().__init__()
        self.embedding = nn.Embedding(8192, 512)
        self.layers = nn.ModuleList(Gated(512, 8) for _ in range(6))
        self.head = nn.Linear(512, 8192, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of the next tokens y, both of shape (batch, positions)."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), y.flatten())


class Residual(nn.Module):
    """Two convolutions with batch norms, added to their input."""

    def __init__(self, channels: int) -> None:
        """Creates convolutions and norms."""
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        y = functional.relu(self.norm1(self.first(x)))
        return functional.relu(x + self.norm2(self.second(y)))


class ResNet(nn.Module):
    """A convolutional classifier of 8 residual blocks."""

    def __init__(self) -> None:
        """Creates stem, blocks and head."""
        super().__init__()
        self.stem = nn.Conv2d(3, 128, 4, 4)
        self.layers = nn.Sequential(*(Residual(128) for _ in range(8)))
        self.head = nn.Linear(128, 1000)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss of images (batch, 3, 224, 224) and classes (batch,)."""
        return functional.cross_entropy(self.head(self.layers(self.stem(x)).mean((2, 3))), y)


def batch(name: str) -> tuple[Tensor, Tensor]:
    """Returns a batch of a model."""
    if name in ("vit", "resnet"):
        return torch.randn(32, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (32,), device="cuda")
    sizes = {"gpt": (8, 512), "llama": (8, 512), "translator": (32, 100)}[name]
    words = torch.randint(0, 8192, sizes, device="cuda")
    return words, words.clone()


def main() -> None:
    """Trains three steps."""
    name, parts, snapshot = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.cuda.memory._record_memory_history()
    models = {"gpt": GPT, "vit": ViT, "translator": Translator, "llama": Llama, "resnet": ResNet}
    model = models[name]().cuda()
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
