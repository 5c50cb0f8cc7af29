"""Mixture of experts: every token goes to its two best experts, so shapes depend on the data."""

import torch
import torch.nn.functional as F
from torch import nn


class MixtureOfExperts(nn.Module):
    def __init__(self, width, experts, chosen=2):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        tokens = x.view(-1, x.shape[-1])
        probabilities = self.router(tokens).softmax(-1)
        weights, picks = probabilities.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slot = (picks == number).nonzero(as_tuple=True)
            if rows.numel():
                out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, slot, None])
        load = F.one_hot(picks, len(self.experts)).float().mean((0, 1))
        balance = len(self.experts) * (load * probabilities.mean(0)).sum()
        return x + out.view_as(x), balance


class Model(nn.Module):
    def __init__(self, vocabulary=50, width=32, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(MixtureOfExperts(width, experts=6) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embedding(ids)
        balance = 0.0
        for layer in self.layers:
            x, part = layer(x)
            balance = balance + part
        return self.head(x), balance


torch.manual_seed(3)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(10):
    ids = torch.randint(50, (8, 33)) % torch.randint(2, 50, ())
    logits, balance = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
