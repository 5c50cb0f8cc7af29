"""A training whose memory grows at first and then stops: caches that fill up, rings, what is replaced every step."""

from __future__ import annotations

import collections
import functools
import sys
import weakref
from typing import Any

import torch

RING: collections.deque[Any] = collections.deque(maxlen=2)
LAST: dict[str, Any] = {}
KNOWN: dict[int, torch.Tensor] = {}
LOSSES: list[float] = []
WEAK: list[Any] = []


@functools.lru_cache(maxsize=2)
def positions(step: int) -> torch.Tensor:
    """A cache that holds two."""
    return torch.zeros(64, 32) + step


def train(steps: int) -> None:
    """Trains."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    smooth = torch.zeros(64, 32)
    for step in range(steps):
        x = torch.randn(64 - step % 3, 16)
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        y = out.detach()
        RING.append(y + 1)
        LAST["out"], LAST["loss"] = out, loss
        KNOWN.setdefault(step % 3, y + 2)
        LOSSES.append(loss.item())
        WEAK.append(weakref.ref(y))
        smooth = smooth * 0.9 + positions(step) * 0.1
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(int(sys.argv[1]))
