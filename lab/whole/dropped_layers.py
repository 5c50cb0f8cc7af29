"""Stochastic depth by random numbers, and a counter inside the model that adds a loss from call 20 on."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.seen = nn.ModuleList(nn.Linear(256, 256) for _ in range(6)), 0

    def forward(self, x):
        self.seen += 1
        kept = x
        for layer in self.layers:
            if torch.rand(1).item() < 0.7:
                kept = kept + layer(kept).tanh()
        return torch.cat((kept, kept.square(), kept.cube()), 1) if self.seen > 20 else kept


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(40):
    model(torch.randn(512, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
