"""Selective activation checkpointing: products are kept, everything else is computed again."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def policy(context, operator, *args, **kwargs):
    if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


torch.manual_seed(12)
layers = nn.ModuleList(
    nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48), nn.Tanh()) for _ in range(4)
)
head = nn.Linear(48, 1)
parameters = [*layers.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
contexts = functools.partial(create_selective_checkpoint_contexts, policy)
for step in range(10):
    x = torch.randn(96, 48)
    target = x.sum(1, keepdim=True).sin()
    for layer in layers:
        x = x + checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    loss = (head(x) - target).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
