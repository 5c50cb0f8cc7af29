"""Activation checkpointing, gradient accumulation, autocast and a learning rate scheduler of the job's own."""

import torch
from torch.utils.checkpoint import checkpoint
from training import make

model, optimizer = make()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for number in range(5):
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.randn(8, 16)
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=number % 2 == 0)
            loss = model.head(x).float().square().mean() / 2
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=number % 2 == 0)
    scheduler.step()
    print(number, loss.item().hex(), scheduler.get_last_lr())
