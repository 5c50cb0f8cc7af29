"""A checkpoint whose states are cloned before they are written (Lightning, ZeRO's consolidation)."""

import io

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
optimizer = torch.optim.Adam(model.parameters())
for step in range(45):
    model(torch.randn(8, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 39:
        copied = {name: each.detach().clone() for name, each in model.state_dict().items()}
        moments = [{k: v.clone() for k, v in state.items()} for state in optimizer.state_dict()["state"].values()]
        torch.save({"model": copied, "optimizer": moments}, io.BytesIO())
        del copied, moments
