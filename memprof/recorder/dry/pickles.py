"""Pickles fake tensors as shapes and types, which any process loads as tensors of ones."""

from __future__ import annotations

import copyreg
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def pickle_shapes() -> None:
    """Makes `pickle` and `copy.copy` accept fake tensors, which torch would reject.

    The pickles refer only to torch, so that a process without memprof can load them.
    """
    fake: Any = FakeTensor
    fake.__copy__ = _copied  # `copy.copy` also uses the table below; it shares the storage
    copyreg.pickle(fake, _reduced)


def outside_dry_run(share: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that shares memory with other processes to run outside the dry run's mode.

    Data sets keep real memory in a dry run. Sharing it runs operators, which the mode would handle as its own.
    """

    @wraps(share)
    def shared(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return share(*args, **kwargs)

    return shared


def _reduced(tensor: torch.Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, torch.nn.Parameter):
        rebuild: Any = torch._utils._rebuild_parameter
        return rebuild, (tensor.detach(), tensor.requires_grad, OrderedDict())
    kind: dict[str, Any] = {"dtype": tensor.dtype, "device": str(tensor.device), "requires_grad": tensor.requires_grad}
    if tensor.is_contiguous():
        return partial(torch.full, **kind), (tuple(tensor.shape), 1)
    return partial(torch.empty_strided, **kind), (tuple(tensor.shape), tensor.stride())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    alias = tensor.detach()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(alias, tensor.requires_grad)
    return alias.requires_grad_(tensor.requires_grad)
