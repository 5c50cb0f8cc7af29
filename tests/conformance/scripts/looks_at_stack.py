import inspect
import sys
import traceback

import torch
from training import make, train

model, optimizer = make()


def look(module, args, output=None):
    for frame in inspect.stack()[1:]:
        print(frame.function, frame.filename, frame.lineno, frame.code_context)


class Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        traceback.print_stack()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        traceback.print_stack()
        print(sys._getframe(1).f_code.co_name)
        return gradient


def looking(x):
    look(None, None)
    return Look.apply(forward(x))


forward = model.head.forward
model.head.forward = looking
model.head.weight.register_hook(lambda gradient: traceback.print_stack())
train(model, optimizer)
