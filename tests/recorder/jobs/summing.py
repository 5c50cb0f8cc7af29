"""A training that sums its losses with their graphs, and keeps the outputs of a layer in a hook.

Run with the number of steps.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> Any:
        """Adds to its input."""
        return x + self.down(self.up(x).tanh())  # the autograd graph of `total`


def train(steps: int) -> None:
    """Trains."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    total: Any = 0.0
    kept: list[Any] = []
    model[1].register_forward_hook(lambda module, args, out: kept.append(out.detach() * 2))  # `kept[
    for _ in range(steps):
        x = torch.randn(16, 32)
        loss = (model(x) - x).square().mean()
        loss.backward(retain_graph=True)
        total = total + loss
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(int(sys.argv[1]))
