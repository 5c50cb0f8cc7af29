"""Reads which hooks for tensors saved by autograd are active."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint

_CHECKPOINT = torch.utils.checkpoint.__name__


def top_hooks() -> tuple[Any, Any] | None:
    """Returns the active pack and unpack hooks for saved tensors, None if there are none."""
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    pair: tuple[Any, Any] | None = top(True)
    return pair


def is_in_checkpoint() -> bool:
    """Whether a region of ``checkpoint(use_reentrant=False)`` runs, in forward or again in backward."""
    hooks = top_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", None) == _CHECKPOINT
