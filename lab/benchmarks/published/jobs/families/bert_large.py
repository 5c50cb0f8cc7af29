"""BERT-large for classification as transformers 4.15 computes it, trained as its Trainer does."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from families.older_softmax import older_softmax
from families.setting import DEVICE, STEPS, expect_parameters
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, POSITIONS, WIDTH, HEADS, LAYERS, MLP, DROPOUT, LENGTH = 30522, 512, 1024, 16, 24, 4096, 0.1, 512
# bert-large-uncased with a head of two labels: 335,141,888 of BertModel and 2,050 of the classifier.
PARAMETERS = 335_143_938


class Embeddings(nn.Module):
    """Words, token types and positions, their sum normed and dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.types = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.dropout = nn.Dropout(DROPOUT)
        self.register_buffer("position_ids", torch.arange(POSITIONS).expand((1, -1)))
        self.register_buffer("type_ids", torch.zeros(1, POSITIONS, dtype=torch.long))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        types = self.type_ids[:, :length].expand(batch, length)
        words = self.words(tokens)
        embeddings = words + self.types(types)
        positions = self.positions(self.position_ids[:, :length])
        embeddings += positions
        return self.dropout(self.norm(embeddings))


class Attention(nn.Module):
    """Self-attention with explicit scores and probabilities, and its output with norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.output_dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        context = self.dense(self.context(hidden, mask))
        context = self.output_dropout(context)
        return self.norm(context + hidden)

    def context(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mixed_query = self.query(hidden)
        key = heads_apart(self.key(hidden))
        value = heads_apart(self.value(hidden))
        query = heads_apart(mixed_query)
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / math.sqrt(WIDTH // HEADS)
        scores = scores + mask
        probabilities = older_softmax(scores, dim=-1)
        probabilities = self.dropout(probabilities)
        context = torch.matmul(probabilities, value)
        context = context.permute(0, 2, 1, 3).contiguous()
        return context.view(*context.shape[:2], WIDTH)


def heads_apart(projected: torch.Tensor) -> torch.Tensor:
    """Returns (batch, heads, length, width of a head) of (batch, length, width), as a view."""
    return projected.view(*projected.shape[:2], HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)


class Layer(nn.Module):
    """Attention, then the MLP with its residual and norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.intermediate = nn.Linear(WIDTH, MLP)
        self.output = nn.Linear(MLP, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attended = self.attention(hidden, mask)
        inner = F.gelu(self.intermediate(attended))
        outer = self.dropout(self.output(inner))
        return self.norm(outer + attended)


class Classifier(nn.Module):
    """Embeddings, 24 layers, the pooled first token, two labels."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(WIDTH, 2)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        attend_to = torch.ones(tokens.shape, device=tokens.device)
        mask = (1.0 - attend_to[:, None, None, :]) * -10000.0
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            if self.checkpointing:
                hidden = checkpoint(layer, hidden, mask, use_reentrant=True)
            else:
                hidden = layer(hidden, mask)
        pooled = torch.tanh(self.pooler(hidden[:, 0]))
        logits = self.classifier(self.dropout(pooled))
        return F.cross_entropy(logits.view(-1, 2), labels.view(-1))


class LoopedAdamW(torch.optim.Optimizer):
    """Adam one parameter at a time with one temporary, as transformers' own AdamW of the time; decay is 0 here."""

    def __init__(self, parameters: Any, lr: float = 5e-5) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["exp_avg"].mul_(first).add_(parameter.grad, alpha=1.0 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1.0 - second)
                denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
                correction = math.sqrt(1.0 - second ** state["step"]) / (1.0 - first ** state["step"])
                parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] * correction)


def train(batch: int, accumulate: int = 1, checkpointing: bool = False, fp16: bool = False) -> None:
    """Trains on random sequences of 512 tokens: clipped gradients, AdamW, gradients zeroed in place.

    Args:
        batch: sequences of one forward and backward.
        accumulate: backwards before a step of the optimizer.
        checkpointing: each of the 24 layers is recomputed in the backward.
        fp16: forward under autocast to float16, the loss scaled.
    """
    model = Classifier(checkpointing)
    expect_parameters(model, PARAMETERS)
    model.to(DEVICE).train()
    optimizer = LoopedAdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda") if fp16 else None
    for _ in range(STEPS):
        for _ in range(accumulate):
            tokens = torch.randint(100, 30000, (batch, LENGTH)).to(DEVICE)
            labels = torch.zeros(batch, dtype=torch.long).to(DEVICE)
            with torch.autocast("cuda", torch.float16) if fp16 else nullcontext():
                loss = model(tokens, labels)
            loss = loss / accumulate
            if scaler is None:
                loss.backward()
            else:
                scaler.scale(loss).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=False)
