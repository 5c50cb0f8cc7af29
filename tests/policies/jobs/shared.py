"""Shared weights: one layer called four times, the embedding tied to the head, a module without parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH, BATCH = 384, 64, 96, 12


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = nn.Linear(3 * WIDTH, WIDTH)
        self.act = nn.SiLU()

    def forward(self, x, scale, *, state=None):
        y = self.narrow(self.act(self.wide(self.norm(x))))
        state = y if state is None else state + y
        return x + scale * y, state


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mixer = Mixer()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x, state = self.embed(ids), None
        for number in range(4):
            x, state = self.mixer(x, 0.5 / (number + 1), state=state)
        return self.head(self.norm(x) + torch.tanh(state))


def make_model():
    return Shared()


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def make_loader():
    ids = torch.randint(VOCABULARY, (BATCH * 8, LENGTH + 1))
    return DataLoader(TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), batch_size=BATCH)


def loss_of(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    from training import train

    train(__doc__, make_loader, make_model, make_optimizer, loss_of)
