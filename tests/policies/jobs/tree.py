"""A tree-structured network: halves are treated by themselves and joined; its depth depends on the sample."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH, CLASSES = 96, 128, 10


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.join = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.branch(x, 0))

    def branch(self, x, depth):
        if depth == 4 or (depth == 3 and float(x[0, 0]) > 0):
            return self.leaf(x)
        parts = [self.branch(x.roll(shift, 1), depth + 1) for shift in (1, 7)]
        return self.join(torch.cat(parts, 1))


def make_model():
    return Tree()


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_loader():
    return DataLoader(
        TensorDataset(torch.randn(BATCH * 8, WIDTH), torch.randint(CLASSES, (BATCH * 8,))), batch_size=BATCH
    )


def loss_of(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


if __name__ == "__main__":
    from training import train

    train(__doc__, make_loader, make_model, make_optimizer, loss_of)
