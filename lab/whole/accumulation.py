"""Gradient accumulation with clipping: each fourth micro-batch ends in an update over copies of the gradients."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256))
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for micro in range(80):
    (model(torch.randn(32, 256)).square().mean() / 4).backward()
    if micro % 4 == 3:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
