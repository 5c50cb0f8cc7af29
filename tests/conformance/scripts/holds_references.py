"""Objects that the job drops are freed at once, and nothing else references those it keeps."""

import gc
import sys
import weakref

import torch
from training import make

gc.disable()
model, optimizer = make()
for _ in range(5):
    batch = torch.randn(8, 16)
    hidden = model.blocks(batch)
    loss = model.head(hidden).square().mean()
    gone = [weakref.ref(hidden), weakref.ref(batch), weakref.ref(loss)]
    print([sys.getrefcount(value) for value in (batch, hidden, loss, model, optimizer, model.head.weight)])
    del hidden, batch
    print([reference() is None for reference in gone])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(sys.getrefcount(model.head.weight.grad), loss._version, model.head.weight._version)
    del loss
    print([reference() is None for reference in gone])
print(sys.getrefcount(model), sys.getrefcount(model.head.weight))
