"""Batches are made ahead in a thread of the script's own and handed over in a queue."""

import queue
import threading

import torch
from torch import nn

torch.manual_seed(27)
batches = queue.Queue(maxsize=2)


def produce(count):
    generator = torch.Generator().manual_seed(27)
    for _ in range(count):
        x = torch.randn(64, 24, generator=generator)
        batches.put((x, (x[:, :6].sum(1) > 0).float()))
    batches.put(None)


producer = threading.Thread(target=produce, args=(10,), daemon=True)
model = nn.Sequential(nn.Linear(24, 80), nn.Mish(), nn.Linear(80, 1), nn.Flatten(0))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
producer.start()
step = 0
while (batch := batches.get()) is not None:
    x, y = batch
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
    step += 1
producer.join()
