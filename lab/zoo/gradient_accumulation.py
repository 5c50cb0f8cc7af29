"""Gradient accumulation: four micro-batches to each optimizer update."""

import torch
from torch import nn

torch.manual_seed(9)
model = nn.Sequential(
    nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
data = [(torch.randn(24, 64), torch.randint(8, (24,))) for _ in range(40)]
accumulation_steps = 4
running = 0.0
for index, (inputs, labels) in enumerate(data):
    loss = criterion(model(inputs), labels) / accumulation_steps
    loss.backward()
    running += loss.item()
    if (index + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
        print(index, repr(running))
        running = 0.0
