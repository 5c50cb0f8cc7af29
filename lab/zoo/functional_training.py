"""torch.func training: the model is called through functional_call only, gradients come from grad and vmap."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

torch.manual_seed(17)
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
buffers = dict(model.named_buffers())


def loss_of(parameters, x, y):
    prediction = functional_call(model, (parameters, buffers), (x,))
    return (prediction - y).pow(2).mean()


per_sample = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))
for step in range(10):
    x = torch.randn(64, 6)
    y = x.prod(1, keepdim=True)
    gradients, losses = per_sample(parameters, x, y)
    for name, value in gradients.items():
        norms = value.flatten(1).norm(dim=1).clamp(min=1.0)
        clipped = value / norms.view(-1, *[1] * (value.dim() - 1))
        parameters[name] = parameters[name] - 0.05 * clipped.mean(0)
    print(step, repr(losses.mean().item()))
