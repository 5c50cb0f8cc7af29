"""The models that several jobs train: transformers, residual networks and a U-Net, at the sizes of each job."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp_of(width: int, times: int = 4) -> nn.Sequential:
    """Returns a layer's channel mixing."""
    return nn.Sequential(nn.Linear(width, times * width), nn.GELU(), nn.Linear(times * width, width))


class Block(nn.Module):
    """A pre-norm transformer layer: self-attention, attention to a memory where there is one, and an MLP.

    Args:
        width: Channels.
        heads: Of the attention; one for each 32 channels by default.
        is_causal: No position attends to later ones.
        is_crossed: It attends to a memory too.
        mlp: Another channel mixing than the usual one.
        dropout: Behind attention and MLP; one of 0 is computed too.
        scores_dropout: The attention is written out, with this dropout of its weights.
    """

    def __init__(
        self,
        width: int,
        heads: int = 0,
        *,
        is_causal: bool = True,
        is_crossed: bool = False,
        mlp: nn.Module | None = None,
        dropout: float | None = None,
        scores_dropout: float | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.is_causal, self.scores_dropout = heads or max(width // 32, 1), is_causal, scores_dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if is_crossed:
            self.norm3 = nn.LayerNorm(width)
            self.query, self.memory, self.crossed = (nn.Linear(width, n * width) for n in (1, 2, 1))
        self.mlp = mlp or mlp_of(width)
        self.dropout = nn.Identity() if dropout is None else nn.Dropout(dropout)

    def split(self, x: Tensor, count: int) -> Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, count, self.heads, width // count // self.heads).permute(2, 0, 3, 1, 4)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.scores_dropout is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        weights = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(-1)
        return F.dropout(weights, self.scores_dropout) @ value

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        query, key, value = self.split(self.qkv(self.norm1(x)), 3)
        mixed = self.attend(query, key, value)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        if memory is not None:
            (query,), (key, value) = self.split(self.query(self.norm3(x)), 1), self.split(self.memory(memory), 2)
            mixed = F.scaled_dot_product_attention(query, key, value)
            x = x + self.crossed(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """A language model.

    Args:
        vocabulary: Words.
        width: Channels.
        layers: The layers between embedding and head.
        length: Most positions, of which each has an embedding; 0 for none.
        has_norm: There is a norm before the head.
        has_bias: The head has a bias.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: list[nn.Module],
        *,
        length: int = 0,
        has_norm: bool = True,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width) if length else None
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width) if has_norm else nn.Identity()
        self.head = nn.Linear(width, vocabulary, bias=has_bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Vision(nn.Module):
    """A vision transformer that averages over its patches."""

    def __init__(self, width: int, layers: list[nn.Module], patch: int, classes: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    """Two convolutions with norms beside a shortcut; a stride of 2 doubles the channels."""

    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        before = width // stride
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(before, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, residual blocks, and a head on their mean."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], width: int, classes: int) -> None:
        super().__init__()
        self.stem, self.layers, self.head = stem, nn.Sequential(*blocks), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(images)).mean((2, 3)))


class UNet(nn.Module):
    """Levels down and up, with a class for each pixel."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sizes = [width << level for level in range(levels)]
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList(self._double(a, b) for a, b in zip([width, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(self._double(a + b, a) for a, b in zip(sizes[-2::-1], sizes[:0:-1], strict=True))
        self.head = nn.Conv2d(width, 100, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        parts = [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.GroupNorm(8, outputs), nn.SiLU()]
        return nn.Sequential(*parts, nn.Conv2d(outputs, outputs, 3, 1, 1), nn.SiLU())

    def forward(self, images: Tensor) -> Tensor:
        x, skipped = self.stem(images), []
        for layer in self.down:
            x = layer(x)
            skipped.append(x)
            x = F.avg_pool2d(x, 2)
        x = skipped.pop()
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2), skipped.pop()], 1))
        return self.head(x)
