"""A word model of stacked LSTM layers that return tuples, Adam, clipped gradients by the loop of its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH, LAYERS, BATCH = 400, 24, 64, 3, 12


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(LAYERS))
        self.dropout = nn.Dropout(0.2)
        self.predict = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        hidden = self.dropout(self.embed(ids))
        for layer in self.layers:
            hidden, _ = layer(hidden)
            hidden = self.dropout(hidden)
        return self.predict(hidden)


def make_model():
    return Words()


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def make_loader():
    ids = torch.randint(VOCABULARY, (BATCH * 8, LENGTH + 1))
    return DataLoader(TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), batch_size=BATCH)


def loss_of(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    from training import train

    train(__doc__, make_loader, make_model, make_optimizer, loss_of)
