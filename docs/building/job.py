"""The training job that the commands of the documentation are run on: a small language model on made-up text."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Layer(nn.Module):
    """Attention and a multi-layer perceptron, each added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns (batch, length, width)."""
        query, key, value = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        return torch.add(x, self.mlp(x))


class Model(nn.Module):
    """Predicts the next of 256 characters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Takes (batch, length), returns logits (batch, length, 256)."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def main() -> None:
    """Trains for a few steps; arguments it does not know are left alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--mixed", action="store_true", help="train on rows of several lengths")
    parser.add_argument("--snapshot", default="snapshot.pickle", help="file for the memory snapshot of a GPU")
    args, _ = parser.parse_known_args()
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    if has_gpu:
        torch.cuda.memory._record_memory_history()
    torch.manual_seed(0)
    text = torch.randint(256, (args.steps * args.batch_size, args.length + 1))
    model = Model(width=64, layers=8).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, (loaded,) in enumerate(DataLoader(TensorDataset(text), args.batch_size)):
        length = args.length // 2 + args.length // 8 * (step % 4)
        rows = (loaded[:, :length].clone() if args.mixed else loaded).to(device)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if has_gpu:
        torch.cuda.memory._dump_snapshot(args.snapshot)


if __name__ == "__main__":
    main()
