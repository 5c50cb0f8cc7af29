"""accelerate: a loop of one's own that accumulates over two batches and clips gradients."""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
accelerator = Accelerator(cpu="ON_GPU" not in os.environ, gradient_accumulation_steps=2)
layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0)
model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Flatten(), nn.Linear(32 * 64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(16 * 32, 32, 64), torch.randint(0, 4, (16 * 32,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32))
for rows, labels in loader:
    with accelerator.accumulate(model):
        loss = functional.cross_entropy(model(rows), labels)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
