"""Moving averages of the weights in copies of the model, one by hand and one by torch's AveragedModel."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(16)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 3))
shadow = copy.deepcopy(model).eval().requires_grad_(False)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


@torch.no_grad()
def update(decay=0.95):
    for old, new in zip(shadow.parameters(), model.parameters(), strict=True):
        old.mul_(decay).add_(new, alpha=1 - decay)
    for old, new in zip(shadow.buffers(), model.buffers(), strict=True):
        old.copy_(new)


for step in range(10):
    x = torch.randn(50, 20)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update()
    averaged.update_parameters(model)
    with torch.no_grad():
        agreement = (shadow(x) - averaged(x)).abs().mean()
    print(step, repr(loss.item()), repr(agreement.item()))
