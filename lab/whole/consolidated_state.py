"""fairscale#790: the optimizer's consolidated state stays after the first save, and the next epoch does not fit."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(5)))
optimizer = torch.optim.Adam(model.parameters())
states = []


def save_checkpoint():
    states[:] = [{name: each.clone() for name, each in state.items()} for state in optimizer.state.values()]


for step in range(36):
    model(torch.randn(64, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 17:
        save_checkpoint()
