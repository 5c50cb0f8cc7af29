"""A job that leaks: it keeps every step's loss with the graph behind it, to print the mean at the end."""

from __future__ import annotations

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for _ in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(512, 256)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(model(torch.randn(256, 256)).square().mean())  # .item() would not keep the graph
print(f"mean loss {torch.stack(losses).mean().item():.4f}")
