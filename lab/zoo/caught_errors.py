"""The script relies on errors and lifetimes: in-place version checks, freed graphs, weak references."""

import gc
import weakref

import torch
from torch import nn

torch.manual_seed(36)
model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)


def attempt(name, action):
    try:
        action()
        print(" ", name, "passed")
    except RuntimeError as error:
        print(" ", name, "raised:", str(error).splitlines()[0])


for step in range(10):
    x = torch.randn(16, 8)
    hidden = model[1](model[0](x))
    loss = model[2](hidden).square().mean()
    if step % 4 == 1:
        spoiled = hidden * 1.0
        square = spoiled.square()
        spoiled.add_(1)
        attempt("in-place change", square.sum().backward)
    optimizer.zero_grad()
    loss.backward()
    if step % 4 == 2:
        attempt("second backward", loss.backward)
    optimizer.step()
    print(step, repr(loss.item()))
    watched = weakref.ref(hidden)
    storage = weakref.ref(hidden.untyped_storage())
    del hidden, loss
    gc.collect()
    print("  freed:", watched() is None, storage() is None, "use:", x._version, model[0].weight._version)
