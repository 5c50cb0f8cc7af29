"""GPT-2 of 124 million parameters without tied weights, from scratch or of PyTorch's own modules, and its training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from families.setting import DEVICE, STEPS, expect_parameters
from torch import nn

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT, BATCH = 50257, 1024, 768, 12, 12, 0.1, 8
# 2 x 50257 x 768 embeddings and head, 1024 x 768 positions, 12 layers of 7,085,568 (queries, keys, values without
# bias), 1,536 of the last norm.
PARAMETERS = 163_009_536


@dataclass(frozen=True)
class Variant:
    """One row of the article's list of improvements; each keeps those before it."""

    stored_mask: bool
    tensor_cores: bool = False
    fused_optimizer: bool = False
    bfloat16: bool = False
    native_modules: bool = False
    flash_attention: bool = False


class ScratchLayerNorm(nn.Module):
    """The norm in six operators, each of which saves what it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class ScratchGELU(nn.Module):
    """The tanh form of GELU in elementwise operators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / math.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class ScratchAttention(nn.Module):
    """Attention with explicit scores; the causal mask is a float buffer of each layer, or made in each forward."""

    def __init__(self, stored_mask: bool) -> None:
        super().__init__()
        self.queries = nn.Linear(WIDTH, WIDTH, bias=False)
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False)
        self.values = nn.Linear(WIDTH, WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        if stored_mask:
            self.register_buffer("mask", torch.triu(torch.ones(CONTEXT, CONTEXT), diagonal=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        keys = self.keys(x).view(batch, length, HEADS, -1)
        queries = self.queries(x).view(batch, length, HEADS, -1)
        values = self.values(x).view(batch, length, HEADS, -1)
        keys, queries, values = keys.transpose(1, 2), queries.transpose(1, 2), values.transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        if hasattr(self, "mask"):
            mask = self.mask.bool()[:length, :length]
        else:
            mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).bool()
        scores.masked_fill_(mask, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        context = (weights @ values).transpose(1, 2)
        return self.projection(context.reshape(batch, length, WIDTH))


class FlashAttention(nn.Module):
    """Queries, keys and values in one linear, and PyTorch's scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv
        context = F.scaled_dot_product_attention(queries, keys, values, dropout_p=DROPOUT, is_causal=True)
        context = context.transpose(1, 2).contiguous().view(batch, length, WIDTH)
        return self.projection(context)


class Layer(nn.Module):
    """Attention and feed-forward, each after its norm, one dropout for both branches."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.attention = FlashAttention() if variant.flash_attention else ScratchAttention(variant.stored_mask)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(approximate="tanh") if variant.native_modules else ScratchGELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.norm1 = nn.LayerNorm(WIDTH) if variant.native_modules else ScratchLayerNorm()
        self.norm2 = nn.LayerNorm(WIDTH) if variant.native_modules else ScratchLayerNorm()
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.feed_forward(x)
        x = self.dropout(x)
        return x + shortcut


class GPT(nn.Module):
    """Token and position embeddings, twelve layers, a norm and a head of its own weights."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.layers = nn.Sequential(*(Layer(variant) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH) if variant.native_modules else ScratchLayerNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.tokens(tokens)
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = embedded + positions
        x = self.dropout(x)
        x = self.layers(x)
        x = self.norm(x)
        return self.head(x)


def train(variant: Variant) -> None:
    """Trains with AdamW on batches of 8 x 1024 tokens."""
    if variant.tensor_cores:
        torch.set_float32_matmul_precision("high")
    model = GPT(variant)
    expect_parameters(model, PARAMETERS)
    model.to(DEVICE)
    if variant.bfloat16:
        # On the device, after the float32 weights were there: their segments stay reserved.
        model.to(torch.bfloat16)
    fused = True if variant.fused_optimizer and DEVICE.type == "cuda" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=fused)
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randint(0, VOCABULARY, (BATCH, CONTEXT))
        targets = torch.randint(0, VOCABULARY, (BATCH, CONTEXT))
        loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy over all positions; logits and batch live on in the graph alone."""
    inputs, targets = inputs.to(DEVICE), targets.to(DEVICE)
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
