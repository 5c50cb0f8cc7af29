"""drop_last=False and a collate function that pads to the longest: the epoch's last batches are the largest."""

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
data = [torch.randn(10 + place // 3, 64) for place in range(130)]
loader = DataLoader(data, batch_size=8, collate_fn=lambda rows: nn.utils.rnn.pad_sequence(rows, batch_first=True))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
