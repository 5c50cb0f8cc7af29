"""SWA: the averaged model is made in epoch 2, and update_bn runs it over the training set."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
batches = [torch.randn(64, 256) for _ in range(12)]
averaged = None
for epoch in range(4):
    for x in batches:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if epoch >= 2:
        averaged = averaged or AveragedModel(model)
        averaged.update_parameters(model)
update_bn([torch.randn(512, 256) for _ in range(3)], averaged)
