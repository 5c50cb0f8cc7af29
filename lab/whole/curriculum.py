"""A sequence-length curriculum: the length doubles in step 40 (DeepSpeed's data efficiency; Automodel#2634)."""

import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
model = nn.TransformerEncoder(layer, 3)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(60):
    length = 32 if step < 20 else 64 if step < 40 else 128
    model(torch.randn(4, length, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
