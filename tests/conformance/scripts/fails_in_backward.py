import sys

import torch
from training import make, train

model, optimizer = make()
kind = sys.argv[1]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in a backward function")


def fail_in_hook(gradient):
    raise LookupError("in a gradient hook")


def fail(number):
    if number != 2:
        return
    if kind == "hook":
        model.head.weight.register_hook(fail_in_hook)
    if kind == "accumulated":
        model.head.weight.register_post_accumulate_grad_hook(fail_in_hook)
    if kind == "function":
        forward = model.head.forward
        model.head.forward = lambda x: Failing.apply(forward(x))
    if kind == "module_hook":
        model.blocks[0].register_full_backward_hook(lambda *args: fail_in_hook(None))
    if kind == "twice":
        loss = model(torch.randn(8, 16)).sum()
        loss.backward()
        loss.backward()
    if kind == "in_place":
        x = torch.randn(4, requires_grad=True)
        y = x.exp()
        z = y * y
        y.add_(1)
        z.sum().backward()


train(model, optimizer, fail)
