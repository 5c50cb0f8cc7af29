"""A decoder whose layers are written in products and sums, as courses have them written."""

import math

import torch
from torch import nn


class Product(nn.Module):
    """A linear layer without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Table(nn.Module):
    """An embedding."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, width))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.weight[words, :]


class Norm(nn.Module):
    """Root mean square normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(kind)


class Rotation(nn.Module):
    """Rotary positions, shared by all layers."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        speeds = 10_000.0 ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(length), speeds)
        self.register_buffer("table", torch.stack((torch.cos(angles), torch.sin(angles))), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, : x.size(-2), :].unbind(0)
        turned_left = cos * left - sin * right
        turned_right = sin * left + cos * right
        return torch.concat((turned_left, turned_right), dim=-1)


def normalize(scores: torch.Tensor) -> torch.Tensor:
    """Softmax, written out."""
    shifted = scores - torch.max(scores, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def find(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention, written out."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = normalize(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width: int, heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (Product(width, width) for _ in range(4))
        self.rotation = rotation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (query, key, value))
        query = self.rotation(query)
        key = self.rotation(key)
        places = torch.arange(x.size(1), device=x.device)
        mask = (places[:, None] >= places[None, :])[None]
        found = find(query, key, value, mask)
        found = found.transpose(1, 2).flatten(2).contiguous()
        return self.out(found)


class Gated(nn.Module):
    """A gated multi-layer perceptron."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = Product(width, hidden), Product(hidden, width), Product(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(activate(self.gate(x)) * self.up(x))


def activate(x: torch.Tensor) -> torch.Tensor:
    """SiLU, written out."""
    return x * torch.sigmoid(x)


class Layer(nn.Module):
    """Attention and perceptron, each normalized before and added."""

    def __init__(self, width: int, hidden: int, heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.attention, self.perceptron = Attention(width, heads, rotation), Gated(width, hidden)
        self.first, self.second = Norm(width), Norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = self.attention(self.first(x))
        middle = x + attended
        changed = self.perceptron(self.second(middle))
        return middle + changed


class Decoder(nn.Module):
    """The model."""

    def __init__(self, words: int, length: int, width: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.table = Table(words, width)
        self.rotation = Rotation(length, width // heads)
        self.layers = nn.ModuleList(Layer(width, hidden, heads, self.rotation) for _ in range(layers))
        self.last = Norm(width)
        self.head = Product(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = embedded = self.table(words)  # noqa: F841 - held until the model returns, as in the recorded script
        for layer in self.layers:
            x = layer(x)
        x = self.last(x)
        return self.head(x)
