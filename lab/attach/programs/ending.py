"""A job that ends while something attaches to it: ending.py exit|raise|kill|hard SECONDS."""

import os
import signal
import sys
import time

import torch
from paced import ready
from torch import nn

torch.manual_seed(6)
kind, seconds = sys.argv[1], float(sys.argv[2])
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(8):
    loss = model(torch.randn(256, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(number, repr(loss.item()), flush=True)
ready()
end = time.monotonic() + seconds
while time.monotonic() < end:
    model(torch.ones(16, 64))
if kind == "raise":
    raise ValueError("the job's own error")
if kind == "kill":
    os.kill(os.getpid(), signal.SIGTERM)
if kind == "hard":
    os._exit(7)
sys.exit(3)
