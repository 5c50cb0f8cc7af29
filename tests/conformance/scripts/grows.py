"""Trains on batches that grow long after the default window, and does what a job may do in the step that is larger."""

import contextlib
import signal
import sys
import threading
import traceback

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WHAT = sys.argv[1]
LARGER = (10, 14)


class Calls(TorchFunctionMode):
    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        Calls.count += 1
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        Operators.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, batch):
        if WHAT == "stack" and step in LARGER:
            print("".join(traceback.format_stack()))
        if WHAT == "error" and step == LARGER[1]:
            raise RuntimeError("in the larger step")
        if WHAT == "signal" and step == LARGER[1]:
            signal.raise_signal(signal.SIGTERM)
        return self.inner(batch)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
modes = (Calls, Operators) if WHAT == "modes" else ()
for step in range(18):
    batch = torch.randn(400 if step in LARGER else 4, 8)
    with contextlib.ExitStack() as entered:
        profile = torch.autograd.profiler.profile(enabled=WHAT == "profiler" and step == LARGER[1])
        for context in (profile, *(mode() for mode in modes)):
            entered.enter_context(context)
        loss = model(batch).square().mean()
        if WHAT == "backward" and step == LARGER[1]:
            loss.register_hook(lambda gradient: 1 / 0)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.random.get_rng_state().sum().item())
    if WHAT == "profiler" and step == LARGER[1]:
        print(sorted({event.key for event in profile.key_averages()}))
if WHAT == "thread":
    thread = threading.Thread(target=lambda: print(model(torch.randn(900, 8)).sum().item()))
    thread.start()
    thread.join()
with torch.no_grad():
    print(model.eval()(torch.randn(1000, 8)).sum().item())
print(Calls.count, len(Operators.names), sorted(set(Operators.names)))
