"""Trains a small character-level GPT on sentences made by a little grammar."""

from __future__ import annotations

import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F

SUBJECTS = ["the captain", "a grey owl", "my neighbour", "the old clock", "every sailor", "the river"]
VERBS = ["remembers", "follows", "repairs", "forgets", "paints", "carries"]
OBJECTS = ["the lighthouse", "a wooden boat", "the northern star", "an empty letter", "the last train"]
ENDINGS = ["before the rain.", "in silence.", "once a year.", "without a map.", "for the children."]


def make_text(sentences: int, seed: int) -> str:
    draw = random.Random(seed)
    parts = (SUBJECTS, VERBS, OBJECTS, ENDINGS)
    return "\n".join(" ".join(draw.choice(part) for part in parts) for _ in range(sentences))


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.token(ids) + self.position(positions))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save-final", metavar="PATH", help="save the final parameters here")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    text = make_text(sentences=2000, seed=args.seed)
    alphabet = sorted(set(text))
    number_of = {letter: number for number, letter in enumerate(alphabet)}
    data = torch.tensor([number_of[letter] for letter in text])

    model = GPT(len(alphabet), args.length, args.width, args.heads, args.layers, args.dropout).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)

    model.train()
    for step in range(args.steps):
        starts = torch.randint(len(data) - args.length - 1, (args.batch_size,)).tolist()
        inputs = torch.stack([data[start : start + args.length] for start in starts]).to(args.device)
        targets = torch.stack([data[start + 1 : start + args.length + 1] for start in starts]).to(args.device)

        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)

    if args.save_final:
        torch.save(model.state_dict(), args.save_final)


if __name__ == "__main__":
    main()
