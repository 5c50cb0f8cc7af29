"""Lists every call that its own modes and subclasses see, inside the window, outside and at its edges."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training import make, step


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(str(getattr(func, "__qualname__", func)))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        seen.append("Named " + str(getattr(func, "__qualname__", func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def show(where):
    print(where, len(seen), *seen, sep="\n")
    seen.clear()


seen = []
with Functions():
    model, optimizer = make()
    show("made")
    for number in range(7):
        step(model, optimizer)
        show(number)
    model.add_module("more", torch.nn.Linear(4, 4))
    (optimizer, other) = (torch.optim.Adam(model.parameters()), optimizer)
    step(model, optimizer)
    show("more")
with Operators():
    model, optimizer = make()
    for number in range(7):
        step(model, optimizer)
        show(number)
model.head.weight = torch.nn.Parameter(torch.randn(4, 16).as_subclass(Named))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for number in range(4):
    step(model, optimizer, torch.randn(8, 16).as_subclass(Named))
    show(number)
