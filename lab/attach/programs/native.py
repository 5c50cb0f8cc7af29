"""A job that is inside native code for seconds: native.py matmul|sleep|locked|idle."""

import ctypes
import sys
import time

import torch
from paced import ready
from torch import nn

torch.manual_seed(4)
kind = sys.argv[1]
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
large = torch.randn(1800, 1800)
for number in range(8):
    if number == 3:
        ready()
    if number == 4:
        if kind == "matmul":
            for _ in range(3):
                large = torch.linalg.matrix_power(large / large.norm(), 40)
        elif kind == "sleep":
            time.sleep(4)
        elif kind == "locked":
            ctypes.PyDLL(None).sleep(4)  # holds the GIL
        elif kind == "idle":
            time.sleep(12)  # longer than an attach may wait
    loss = model(torch.randn(256, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(number, repr(loss.item()), repr(large.norm().item()))
