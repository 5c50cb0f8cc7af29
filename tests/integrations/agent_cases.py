"""Jobs with planted faults that an agent solves by tool calls: out of memory on a device, and leaks."""

from __future__ import annotations

#: Models, their batch, and an optimizer: each runs out of memory on a virtual RTX 4090.
_OUT_OF_MEMORY = """\
import sys
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 64)).transpose(1, 3).unbind(2)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.mlp(x)


class Language(nn.Module):
    def __init__(self, width, layers, words):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.GRUCell(width, width) for _ in range(layers))

    def forward(self, x):
        states = [torch.zeros_like(x[0]) for _ in self.layers]
        for step in x:
            for place, layer in enumerate(self.layers):
                step = states[place] = layer(step, states[place])
        return step


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return F.relu(x + self.inside(x))


def perceptron(width, layers):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def feed_forward(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def tokens(batch, length, words):
    return lambda: torch.randint(words, (batch, length), device="cuda")


def noise(*shape):
    return lambda: torch.randn(*shape, device="cuda")


CASES = {
    "wide-batch": lambda: (perceptron(1024, 32), noise(196608, 1024), torch.optim.SGD, 0),
    "deep-perceptron": lambda: (perceptron(2048, 160), noise(16384, 2048), torch.optim.SGD, 0),
    "transformer": lambda: (Language(768, 24, 8192), tokens(24, 1024, 8192), torch.optim.AdamW, 8192),
    "long-sequence": lambda: (Language(512, 16, 4096), tokens(3, 16384, 4096), torch.optim.AdamW, 4096),
    "logits": lambda: (Language(256, 2, 131072), tokens(16, 1024, 131072), torch.optim.SGD, 131072),
    "convolutions": lambda: (
        nn.Sequential(*(Residual(64) for _ in range(24))), noise(96, 64, 112, 112), torch.optim.SGD, 0),
    "optimizer-state": lambda: (perceptron(8192, 24), noise(64, 8192), torch.optim.AdamW, 0),
    "recurrent": lambda: (Recurrent(1024, 2), noise(64, 8192, 1024), torch.optim.Adam, 0),
    "feed-forward": lambda: (nn.Sequential(*(feed_forward(1024) for _ in range(24))), noise(28672, 1024),
                             torch.optim.AdamW, 0),
    "encoder": lambda: (
        nn.Sequential(*(nn.TransformerEncoderLayer(1024, 16, batch_first=True) for _ in range(12))),
        noise(48, 1024, 1024), torch.optim.AdamW, 0),
}

model, batch, kind, words = CASES[sys.argv[1]]()
model = model.cuda()
optimizer = kind(model.parameters(), lr=1e-4)
for step in range(4):
    rows = batch()
    out = model(rows)
    loss = F.cross_entropy(out.flatten(0, 1), rows.flatten()) if words else out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
"""

#: Training whose memory grows, by the name in argv: the line marked with the name makes what stays.
_LEAKS = """\
import functools
import sys
import torch

leak = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
kept_outputs, kept_losses, by_step = [], [], {}
model.steps = []


class Monitor:
    batches = []


@functools.lru_cache(maxsize=None)
def mask(step):
    return torch.full((64, 100), float(step))  # cache


for step in range(8):
    x = torch.randn(300, 128)  # class
    out = model(x)
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if leak == "outputs":
        kept_outputs.append(out.detach().clone())  # outputs
    if leak == "dict":
        by_step[step] = out.detach() * 2  # dict
    if leak == "attribute":
        model.steps.append(torch.full((64, 64), 1.0))  # attribute
    if leak == "class":
        Monitor.batches.append(x)
    if leak == "cache":
        mask(step)
"""

OUT_OF_MEMORY = (
    "wide-batch",
    "deep-perceptron",
    "transformer",
    "long-sequence",
    "logits",
    "convolutions",
    "optimizer-state",
    "recurrent",
    "feed-forward",
    "encoder",
)

#: Each leak, and a word of what holds it.
LEAKS = {
    "outputs": "kept_outputs",
    "dict": "by_step",
    "attribute": "steps",
    "class": "batches",
    "cache": "mask",
}

FILES = {"train.py": _OUT_OF_MEMORY, "leaking.py": _LEAKS}


def leaking_line(name: str) -> int:
    """Returns the number of the line that makes what a leak keeps."""
    return next(number for number, line in enumerate(_LEAKS.splitlines(), 1) if line.endswith(f"# {name}"))
