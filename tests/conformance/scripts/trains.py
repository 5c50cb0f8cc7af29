"""Losses, parameters, optimizer state and every random state, to the bit."""

import hashlib
import random

import numpy
import torch
from training import train


def digest(tensors):
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


random.seed(1)
numpy.random.seed(2)
model, optimizer = train()
print("parameters", digest(model.parameters()))
print("gradients", digest(parameter.grad for parameter in model.parameters()))
print("state", digest(value for state in optimizer.state.values() for value in state.values()))
print("torch", digest([torch.get_rng_state()]), "python", random.random(), "numpy", numpy.random.rand())
print(sorted(vars(model)), sorted(vars(optimizer)), sorted(optimizer.state_dict()))
print(torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
print(torch.are_deterministic_algorithms_enabled())
