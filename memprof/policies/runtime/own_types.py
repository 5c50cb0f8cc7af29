"""Detects torch's own tensor types, including those of a dry run, which hold no values."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

#: Types that policies treat as plain memory. Subclasses may hold anything and are left alone.
OWN_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values to read; those of a dry run have none."""
    return not isinstance(tensor, FakeTensor)


def is_dry_run() -> bool:
    """Whether this is a dry run: tensors are created without memory."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_in_transform() -> bool:
    """Whether a transform of torch.func is under way (grad, vmap, jvp), whose tensors have no memory of their own."""
    return torch._C._functorch.peek_interpreter_stack() is not None
