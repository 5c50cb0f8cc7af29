"""A thread trains, and ends in the middle of the recorded steps; the main thread goes on."""

import threading

import torch
from training import make, step

losses = []


def work():
    model, optimizer = make()
    for _ in range(2):  # the second step is the first recorded one
        losses.append(step(model, optimizer).hex())
    losses.append(model(torch.randn(8, 16)).sum().item().hex())


thread = threading.Thread(target=work)
thread.start()
thread.join()
print(losses)
print((torch.ones(100, 100) @ torch.ones(100, 100)).sum().item())
print("main ends")
