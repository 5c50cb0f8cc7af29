"""A training with 29 leaks: every line with a comment makes a tensor that stays, and the comment says what holds it.

Run with the number of steps.
"""

from __future__ import annotations

import collections
import functools
import logging.handlers
import queue
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

OUTPUTS: list[Any] = []
DETACHED: list[Any] = []
LOSSES: list[Any] = []
RETAINED: list[Any] = []
BATCHES: list[Any] = []
HISTORY: dict[str, Any] = {"loss": [], "by_step": {}, "gradients": []}
QUEUE: queue.Queue[Any] = queue.Queue()
RING: collections.deque[Any] = collections.deque()
ERRORS: list[BaseException] = []
SEEN: set[Any] = set()
NAMED = types.SimpleNamespace(kept=[])
THREAD = threading.local()
AVERAGE = torch.zeros(64, 32)
MEMORY = logging.handlers.MemoryHandler(capacity=10_000)
PAIRS: collections.defaultdict[str, list[Any]] = collections.defaultdict(list)


class Trainer:
    """Keeps things in attributes, and in its class."""

    shared: list[Any] = []  # noqa: RUF012 - that it is shared is the leak

    def __init__(self) -> None:
        self.logged: list[Any] = []


class Slotted:
    """Has no dictionary."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[Any] = []


@functools.cache
def unbounded(step: int) -> torch.Tensor:
    """A cache without a bound."""
    return torch.zeros(64, 32) + step  # unbounded | cache


@functools.lru_cache(maxsize=512)
def bounded(step: int) -> torch.Tensor:
    """A cache with a far bound."""
    return torch.zeros(64, 32) + step  # bounded | cache


def remembering() -> Callable[[Any], None]:
    """Returns a function that remembers what it is called with."""
    memory: list[Any] = []

    def remember(value: Any) -> None:
        memory.append(value)

    return remember


def collecting() -> Iterator[None]:
    """Collects what is sent to it."""
    inside: list[Any] = []
    while True:
        inside.append((yield))  # type: ignore[misc]


def fail(x: torch.Tensor) -> None:
    """Fails with something in a local variable."""
    activations = x.exp()  # ERRORS[ | exception
    raise ValueError(activations.shape)


class Saving(torch.autograd.Function):
    """An operation of the job's own that keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Keeps a copy."""
        ctx.kept = x.detach().cos()  # KEPT[ | global
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Returns ones."""
        return torch.ones(64, 32) * gradients[0]


KEPT: list[Any] = []
TRAINER, SLOTTED = Trainer(), Slotted()


def train(steps: int) -> None:
    """Trains."""
    global AVERAGE  # noqa: PLW0603 - a global that grows is the leak
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    hook = model[0].register_forward_hook(
        lambda module, args, out, kept=[]: kept.append(out.sin())  # _forward_hooks[ | local
    )
    remember, collector, mine = remembering(), collecting(), []
    next(collector)
    THREAD.kept = []
    for step in range(steps):
        x = torch.randn(64, 16)
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        y = out.detach()
        OUTPUTS.append(model[2](y))  # OUTPUTS[ | global
        DETACHED.append(y + 1)  # DETACHED[ | global
        LOSSES.append((y * out.std()).sum())  # LOSSES[ | global
        RETAINED.append(model[2](y.sigmoid()).sum())  # RETAINED[ | global
        RETAINED[-1].backward(retain_graph=True)
        BATCHES.append((x + 0, step))  # BATCHES[ | global
        HISTORY["loss"].append(y * 2)  # HISTORY['loss'][ | global
        HISTORY["by_step"][step] = [y * 3]  # HISTORY['by_step'][ | global
        QUEUE.put(y * 4)  # QUEUE.queue[ | global
        RING.append(y * 5)  # RING[ | global
        SEEN.add(y * 6)  # SEEN | global
        NAMED.kept.append((y * 7)[:, :1])  # NAMED.kept[ | global
        THREAD.kept.append(y * 8)  # THREAD | global
        TRAINER.logged.append(y * 9)  # TRAINER.logged[ | global
        SLOTTED.kept.append(y * 10)  # SLOTTED | global
        Trainer.shared.append(y * 11)  # Trainer.shared[ | class
        remember(y * 12)  # closure variable memory of | closure
        collector.send(y * 13)  # type: ignore[attr-defined]  # collector (inside collecting) | local
        mine.append({"value": y * 14})  # mine[ | local
        PAIRS["a"].append((step, y * 15))  # PAIRS['a'][ | global
        MEMORY.emit(logging.makeLogRecord({"args": y * 16, "levelno": 1}))  # MEMORY.buffer[ | global
        model.features = [*getattr(model, "features", []), y * 17]  # model.features[ | local
        model.register_buffer(f"seen{step}", y * 18)  # model._buffers['seen | local
        optimizer.state[model[0].weight].setdefault("old", []).append(y * 19)  # .state[ | optimizer
        AVERAGE = AVERAGE * 0.9 + model[2](y).exp()  # AVERAGE | graph
        KEPT.append(Saving.apply(out.detach().requires_grad_()))
        HISTORY["gradients"].append(model[0].weight.grad)
        unbounded(step)
        bounded(step)
        try:
            fail(y)
        except ValueError as error:
            ERRORS.append(error)
        optimizer.step()
        optimizer.zero_grad()
    hook.remove()


if __name__ == "__main__":
    train(int(sys.argv[1]))
