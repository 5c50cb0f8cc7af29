"""Weights are swapped for their moving average before the evaluation (diffusers' EMAModel.store, restore)."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
average = [each.detach().clone() for each in model.parameters()]
for step in range(36):
    model(torch.randn(8, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for kept, each in zip(average, model.parameters(), strict=True):
            kept.lerp_(each, 0.01)
        if step == 30:
            stored = [each.detach().clone() for each in model.parameters()]
            for each, kept in zip(model.parameters(), average, strict=True):
                each.copy_(kept)
            model(torch.randn(2048, 512))
            for each, kept in zip(model.parameters(), stored, strict=True):
                each.copy_(kept)
            del stored
