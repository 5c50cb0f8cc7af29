"""Activation checkpointing with dropout inside, reentrant or not."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--use-reentrant", action="store_true")
args = parser.parse_args()


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, width=64, layers=5):
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.layers = nn.ModuleList(FeedForward(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=args.use_reentrant)
        return self.head(x)


torch.manual_seed(11)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(10):
    x, y = torch.randn(128, 16), torch.randint(4, (128,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
