"""Trains a transformer of the shape that a formula counts: for comparing `memprof estimate` with recordings."""

from __future__ import annotations

import argparse
import contextlib
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.heads, self.groups = args.heads, args.kv_heads or args.heads
        self.head_width, self.args = args.width // args.heads, args
        is_gpt = args.style == "gpt"
        key_width = self.groups * self.head_width
        self.query = nn.Linear(args.width, args.width, bias=is_gpt)
        self.key = nn.Linear(args.width, key_width, bias=is_gpt)
        self.value = nn.Linear(args.width, key_width, bias=is_gpt)
        self.out = nn.Linear(args.width, args.width, bias=is_gpt)
        self.score_dropout = nn.Dropout(args.dropout)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.view(batch, length, -1, self.head_width).transpose(1, 2) for part in parts)
        if self.args.attention == "flash":
            is_grouped = self.groups != self.heads
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
        else:
            scores = query @ key.transpose(2, 3) / math.sqrt(self.head_width)
            mixed = self.score_dropout(scores.softmax(-1)) @ value
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class Plain(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.into = nn.Linear(args.width, args.inner)
        self.out = nn.Linear(args.inner, args.width)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.out(F.gelu(self.into(x))))


class Gated(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.gate = nn.Linear(args.width, args.inner, bias=False)
        self.into = nn.Linear(args.width, args.inner, bias=False)
        self.out = nn.Linear(args.inner, args.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.silu(self.gate(x)) * self.into(x))


class Layer(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        norm = nn.LayerNorm if args.style == "gpt" else nn.RMSNorm
        self.norm1, self.norm2 = norm(args.width), norm(args.width)
        self.attention = Attention(args)
        self.mlp = Plain(args) if args.style == "gpt" else Gated(args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.token = nn.Embedding(args.vocabulary, args.width)
        self.position = nn.Embedding(args.length, args.width) if args.style == "gpt" else None
        self.dropout = nn.Dropout(args.dropout)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.layers))
        self.norm = (nn.LayerNorm if args.style == "gpt" else nn.RMSNorm)(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        if args.style == "gpt":
            self.head.weight = self.token.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        if self.position is not None:
            x = self.dropout(x + self.position.weight)
        every = self.args.checkpoint_every
        for first in range(0, len(self.layers), every or 1):
            part = self.layers[first : first + (every or 1)]
            x = checkpoint(run, part, x, use_reentrant=False) if every else run(part, x)
        return self.head(self.norm(x))


def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--style", choices=("gpt", "llama"), default="gpt")
    parser.add_argument("--attention", choices=("flash", "written"), default="written")
    parser.add_argument("--precision", choices=("fp32", "bf16", "bf16-autocast"), default="fp32")
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adamw", "adafactor"), default="adamw")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=0)
    parser.add_argument("--inner", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.dropout *= args.style == "gpt"

    torch.manual_seed(0)
    model = Model(args).to(args.device, torch.bfloat16 if args.precision == "bf16" else torch.float32)
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}
    if args.optimizer == "momentum":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = kinds[args.optimizer](model.parameters(), lr=1e-3)
    for _ in range(args.steps):
        numbers = torch.randint(args.vocabulary, (2, args.batch_size, args.length), device=args.device)
        ids, targets = numbers[0].clone(), numbers[1].clone()
        optimizer.zero_grad()
        is_cast = args.precision == "bf16-autocast"
        with torch.autocast(args.device, torch.bfloat16) if is_cast else contextlib.nullcontext():
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
