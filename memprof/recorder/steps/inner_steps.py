"""Recognizes steps of an optimizer that are part of another: of those, too, torch runs the hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

#: Code of torch's function around a step, which runs its hooks.
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__

#: Optimizers that are updating one parameter, by identity.
_updating: set[int] = set()


def is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the hook that calls this is that of a step within another step of the same optimizer.

    torch puts the hooks around the step of a class when its first instance is made. Where that was done for AdamW, and
    then for a subclass whose step calls ``super().step()``, each step runs them twice: the outer ones count.

    Args:
        optimizer: The optimizer.
    """
    if is_part(optimizer):
        return True
    hooked = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and hooked < 2:
        hooked += frame.f_code is _HOOKED and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return hooked == 2


def is_part(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer makes a part of an update, outside of its step.

    Args:
        optimizer: The optimizer.
    """
    return id(optimizer) in _updating


@contextmanager
def inner_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Has all steps of an optimizer be inner ones: parts of an update that a plan makes outside of its step.

    Args:
        optimizer: The optimizer.
    """
    _updating.add(id(optimizer))
    try:
        yield
    finally:
        _updating.discard(id(optimizer))
