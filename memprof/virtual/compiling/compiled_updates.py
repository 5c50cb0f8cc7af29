"""Compiled optimizer updates: ``torch.compile(optimizer.step)``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def is_update(function: Any) -> bool:
    """Whether a function is the step of an optimizer."""
    return isinstance(getattr(function, "__self__", None), torch.optim.Optimizer)


def after_first(update: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled update whose first call runs eagerly.

    The first one creates the optimizer's state. torch would create it while it traces, where the recorder does not see
    it.

    Args:
        update: The update.
        compiled: The same, compiled.
    """
    latest = [update, compiled]

    @wraps(update)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (latest.pop(0) if len(latest) > 1 else compiled)(*args, **kwargs)

    return run
