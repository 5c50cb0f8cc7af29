"""The language model of Stanford's CS336 (2025, assignment 2), in its own elementary operators."""

from __future__ import annotations

import math

import torch
from families.setting import DEVICE, STEPS, expect_parameters
from torch import nn

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, MLP = 10000, 256, 768, 12, 12, 3072
# Embedding and head of 10000 x 768 each, 12 layers of 9,438,720, 768 of the last norm.
PARAMETERS = 128_625_408


class Linear(nn.Module):
    """A weight without bias, applied by einsum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs).normal_(std=0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm in elementary operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * rms
        return (self.weight * x).to(torch.float32)


class Rotary(nn.Module):
    """Rotates the pairs of queries and keys by their position."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(CONTEXT).float(), 10000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos_sin", torch.stack((torch.cos(angles), torch.sin(angles))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.cos_sin[:, : x.size(-2), :].unbind(0)
        first_rotated = cos * first - sin * second
        second_rotated = sin * first + cos * second
        return torch.stack((first_rotated, second_rotated), dim=-1).flatten(-2).contiguous()


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension in elementary operators."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


class Attention(nn.Module):
    """Causal attention with explicit scores."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.queries = Linear(WIDTH, WIDTH)
        self.keys = Linear(WIDTH, WIDTH)
        self.values = Linear(WIDTH, WIDTH)
        self.projection = Linear(WIDTH, WIDTH)
        self.rotary = rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.queries(x), self.keys(x), self.values(x)
        queries, keys, values = (y.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for y in (queries, keys, values))
        queries = self.rotary(queries)
        keys = self.rotary(keys)
        places = torch.arange(x.size(-2), device=x.device)
        mask = (places[:, None] >= places[None, :])[None, ...]
        attended = attend(queries, keys, values, mask)
        attended = attended.transpose(-2, -3).flatten(-2).contiguous()
        return self.projection(attended)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns (batch, heads, length, width of a head), by masked scores."""
    scores = torch.einsum("...qd,...kd->...qk", queries, keys) / math.sqrt(keys.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, values)


class SwiGLU(nn.Module):
    """The gated feed-forward of three weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = Linear(WIDTH, MLP)
        self.w2 = Linear(MLP, WIDTH)
        self.w3 = Linear(WIDTH, MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """The activation in two operators."""
    return x * torch.sigmoid(x)


class Layer(nn.Module):
    """Attention and feed-forward, each after its norm."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.attention = Attention(rotary)
        self.feed_forward = SwiGLU()
        self.norm1 = RMSNorm()
        self.norm2 = RMSNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.attention(self.norm1(x))
        attended = x + branch
        fed = self.feed_forward(self.norm2(attended))
        return attended + fed


class CourseLM(nn.Module):
    """Embedding, twelve layers, a norm, a head of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(VOCABULARY, WIDTH).normal_())
        rotary = Rotary()
        self.layers = nn.ModuleList(Layer(rotary) for _ in range(LAYERS))
        self.norm = RMSNorm()
        self.head = Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.tokens[tokens, :]
        x = embedded
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean negative log likelihood in elementary operators."""
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension."""
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def accumulate(batch: int) -> None:
    """Runs forwards and backwards without an optimizer; gradients add up, the last logits stay for the next forward."""
    model = CourseLM()
    expect_parameters(model, PARAMETERS)
    model.to(DEVICE)
    tokens = torch.randint(0, VOCABULARY, (batch, CONTEXT)).to(DEVICE)
    targets = torch.randint(0, VOCABULARY, (batch, CONTEXT)).to(DEVICE)
    for _ in range(STEPS):
        logits = model(tokens)
        loss = cross_entropy(logits, targets)
        loss.backward()
