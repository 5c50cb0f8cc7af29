"""Warnings name the line of code that caused them, which a recorder in between must not shift."""

import warnings

import numpy
import torch
from training import make, train

warnings.simplefilter("always")
model, optimizer = make()
forward = model.head.forward


def warning(x):
    warnings.warn("from forward", stacklevel=1)
    warnings.warn("from the caller of forward", stacklevel=2)
    torch.nn.functional.mse_loss(x[:1], x)  # warns of the sizes
    x[0, :1].std()  # warns in C++, inside the operator
    torch.range(0, 1)  # warns in C++, before the operator
    array = numpy.zeros(3, dtype=numpy.float32)
    array.flags.writeable = False
    torch.from_numpy(array)
    return forward(x)


model.head.forward = warning
train(model, optimizer)
