"""A decoder that is not trained: the whole life of a process, from the first weight to the third forward."""

import math

import torch
from torch import nn

WORDS, WIDTH, HIDDEN, HEADS, LAYERS, LONGEST = 10_000, 512, 1_344, 16, 4, 256
SAMPLES, LENGTH = 10, 100

torch.cuda.memory._record_memory_history(max_entries=1_000_000)


def draw(rows: int, columns: int, deviation: float) -> nn.Parameter:
    """Returns a weight of cut normal numbers."""
    weight = nn.Parameter(torch.empty(rows, columns, device="cuda"))
    nn.init.trunc_normal_(weight, mean=0, std=deviation, a=-3 * deviation, b=3 * deviation)
    return weight


class Product(nn.Module):
    """A linear layer without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = draw(outputs, inputs, math.sqrt(2 / (inputs + outputs)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bti,oi->bto", x, self.weight)


class Norm(nn.Module):
    """Root mean square normalization by a division."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        return x / size * self.weight


class Rotation(nn.Module):
    """Rotary positions, of which each call moves a part to the device."""

    def __init__(self) -> None:
        super().__init__()
        pairs = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(LONGEST), 10_000.0 ** -(torch.arange(pairs) / pairs))
        self.sin, self.cos = torch.sin(angles), torch.cos(angles)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[-2])
        sin, cos = self.sin[places].to("cuda")[..., None], self.cos[places].to("cuda")[..., None]
        x = x.unflatten(-1, (-1, 2))
        first = cos * x[..., :1] - sin * x[..., 1:]
        second = sin * x[..., :1] + cos * x[..., 1:]
        return torch.cat([first, second], dim=-1).flatten(-2)


def find(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention, written out, with a mask from the processor."""
    mask = mask.to("cuda")
    product = torch.einsum("bhqd,bhkd->bhqk", query, key)
    scores = product / torch.sqrt(torch.tensor(query.shape[-1], device="cuda"))
    masked = scores.masked_fill_(~mask.bool(), -float("inf"))
    weights = normalize(masked)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


def normalize(scores: torch.Tensor) -> torch.Tensor:
    """Softmax, with its powers computed twice."""
    largest, _ = torch.max(scores, dim=-1, keepdim=True)
    return torch.exp(scores - largest) / torch.sum(torch.exp(scores - largest), dim=-1, keepdim=True)


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = Rotation()
        self.query, self.key, self.value, self.out = (Product(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (query, key, value))
        query = self.rotation(query)
        key = self.rotation(key)
        found = find(query, key, value, torch.tril(torch.ones(x.shape[-2], x.shape[-2])))
        found = found.transpose(1, 2).flatten(2)
        return self.out(found)


class Gated(nn.Module):
    """A gated multi-layer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down, self.up = Product(WIDTH, HIDDEN), Product(HIDDEN, WIDTH), Product(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x)
        opened = gate * torch.sigmoid(gate)
        up = self.up(x)
        both = opened * up
        return self.down(both)


class Layer(nn.Module):
    """Attention and perceptron, each normalized before and added."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Norm(), Norm()
        self.attention, self.perceptron = Attention(), Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        attended = self.attention(first)
        middle = attended + x
        second = self.second(middle)
        changed = self.perceptron(second)
        return changed + middle


class Decoder(nn.Module):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = draw(WORDS, WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last = Norm()
        self.head = Product(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table[words]
        for layer in self.layers:
            x = layer(x)
        x = self.last(x)
        return self.head(x)


model = Decoder()
words = torch.randint(0, WORDS, (SAMPLES, LENGTH)).to("cuda")
for _ in range(3):
    model(words)
torch.cuda.memory._dump_snapshot("gpu.pickle")
