"""A learning-rate finder: the model and the optimizer are copied, tried on a batch twice as large, and restored."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def train(rows):
    model(torch.randn(rows, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(25):
    train(32)
kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
for _ in range(20):
    train(64)
model.load_state_dict(kept[0])
optimizer.load_state_dict(kept[1])
del kept
for _ in range(10):
    train(32)
