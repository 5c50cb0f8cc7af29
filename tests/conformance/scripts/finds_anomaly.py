"""Anomaly detection prints the stack of the forward operator, as it was."""

import torch
from training import make, train

model, optimizer = make()


def spoil(number):
    if number == 2:
        model.head.forward = lambda x: torch.sqrt(x[:, :4] * 0) * 0


with torch.autograd.set_detect_anomaly(True):
    train(model, optimizer, spoil)
