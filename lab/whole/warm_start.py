"""Layers are unfrozen in step 25 (ULMFiT, Detectron2): gradients and optimizer state of the backbone come late."""

import torch
from torch import nn

torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
model = nn.Sequential(backbone, nn.Linear(1024, 10))
backbone.requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(50):
    if step == 25:
        backbone.requires_grad_(True)
    nn.functional.cross_entropy(model(torch.randn(32, 256)), torch.randint(0, 10, (32,))).backward()
    optimizer.step()
    optimizer.zero_grad()
