"""Reads which hooks for tensors saved by autograd are active."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint

_CHECKPOINT = torch.utils.checkpoint.__name__
_is_enabled = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
#: What `hooks_of_job` returns where the job has disabled all hooks, and where a checkpoint's are innermost.
DISABLED, CHECKPOINT = -1, -2


def top_hooks() -> tuple[Any, Any] | None:
    """Returns the active pack and unpack hooks for saved tensors, None if there are none."""
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    pair: tuple[Any, Any] | None = top(True)
    return pair


def is_in_checkpoint() -> bool:
    """Whether a region of ``checkpoint(use_reentrant=False)`` runs, in forward or again in backward."""
    hooks = top_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", None) == _CHECKPOINT


def hooks_of_job() -> int:
    """Returns which hooks of the job are the innermost: a number that no others have while these are active.

    Returns:
        0 without hooks, and for those of a plan; else DISABLED, CHECKPOINT or another number.
    """
    hooks = top_hooks()
    if hooks is None:
        # Transforms of torch.func disable hooks, too; their operators are known by their stacks.
        return 0 if _is_enabled() or torch._C._functorch.peek_interpreter_stack() is not None else DISABLED
    module = getattr(hooks[0], "__module__", None) or ""
    if module == _CHECKPOINT:
        return CHECKPOINT
    return 0 if module.startswith("memprof.") else id(hooks[0])
