"""Accelerate with gradient accumulation and clipping."""

import torch
from accelerate import Accelerator
from torch import nn

torch.manual_seed(5)
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(400, 16), torch.randint(4, (400,)))
loader = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, (x, y) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(number, repr(loss.item()))
