"""Trains through a second device, made in Python, whose backward the engine runs in a separate thread."""

import gc
import sys
import threading
import time

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from torch.utils.checkpoint import checkpoint


class Backend(_DummyBackendModule):
    """What torch asks of a device: checkpointing wants to know what autocast casts to."""

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("far", backend_module=Backend())


class Far(torch.Tensor):
    """A tensor of the far device, whose numbers are the processor's."""

    @staticmethod
    def __new__(cls, here):
        return torch.Tensor._make_wrapper_subclass(cls, here.shape, dtype=here.dtype, device="far:0")

    def __init__(self, here):
        self.here = here

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def fetch(value):
            return value.here if isinstance(value, Far) else value

        found = func(*tree_map(fetch, args), **tree_map(fetch, kwargs or {}))
        return tree_map(lambda value: Far(value) if isinstance(value, torch.Tensor) else value, found)


class There(torch.autograd.Function):
    """Moves to the far device."""

    @staticmethod
    def forward(ctx, here):
        return Far(here.detach().clone())

    @staticmethod
    def backward(ctx, gradient):
        threads.add(threading.get_ident())
        return gradient.here * 1


class Back(torch.autograd.Function):
    """Moves back to the processor."""

    @staticmethod
    def forward(ctx, far):
        return far.here * 1

    @staticmethod
    def backward(ctx, gradient):
        return Far(gradient * 1)


class Square(torch.nn.Module):
    """x times x."""

    def forward(self, value):
        return value * value


class Net(torch.nn.Module):
    """One layer here, one there, one here."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.square = Square()
        self.again = Square()
        self.last = torch.nn.Linear(64, 1)

    def forward(self, batch):
        far = There.apply(self.first(batch))
        far = self.square(far)
        if "checkpoint" in sys.argv:
            far = checkpoint(self.again, far, use_reentrant="reentrant" in sys.argv, preserve_rng_state=False)
        else:
            far = self.again(far)
        return self.last(Back.apply(far))


threads = set()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for _ in range(7):
    loss = model(torch.randn(32, 64)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
assert threads
assert threading.get_ident() not in threads
# The engine's thread lets go of Python objects after backward: not while Python ends, which would abort the process.
del loss, model, optimizer
gc.collect()
time.sleep(0.5)
