"""Spectral and weight norm as parametrizations, weights frozen halfway, a parameter added to the optimizer late."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

torch.manual_seed(38)
body = nn.Sequential(spectral_norm(nn.Linear(16, 32)), nn.ReLU(), weight_norm(nn.Linear(32, 32)), nn.ReLU())
head = nn.Linear(32, 3)
scale = nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05, momentum=0.9)
for step in range(10):
    if step == 4:
        optimizer.add_param_group({"params": [scale]})
    if step == 6:
        body[0].requires_grad_(False)
    x = torch.randn(32, 16)
    loss = nn.functional.cross_entropy(head(body(x)) * scale, x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
