"""No optimizer: the parameters are updated by hand."""

import torch
from torch import nn

torch.manual_seed(19)
model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 1))
for step in range(10):
    x = torch.randn(30, 10)
    loss = (model(x) - x.square().sum(1, keepdim=True)).abs().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    print(step, repr(loss.item()))
