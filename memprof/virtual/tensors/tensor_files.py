"""Fake tensors in files: safetensors that return shapes, and pickles of shapes and types."""

from __future__ import annotations

import copyreg
import importlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from memprof.virtual.tensors.fakes import mapped


def watch_safetensors(watched: Callable[[Any], AbstractContextManager[None]], is_begun: Callable[[], bool]) -> None:
    """Replaces `safetensors.safe_open`; does nothing if the library is not installed.

    Args:
        watched: Context around the opening of a file, which notes a missing one.
        is_begun: Returns whether the job has created its first model; until then, tensors on the processor are data.
    """
    if find_spec("safetensors") is None:
        return
    library: Any = importlib.import_module("safetensors")
    original = library.safe_open

    def safe_open(filename: Any, framework: str, device: Any = "cpu", **more: Any) -> Any:
        if active_fake_mode() is None or framework not in ("pt", "torch", "pytorch"):
            with watched(filename):
                return original(filename, framework=framework, device=device, **more)
        # The file is mapped, not read; and the device may not exist.
        with watched(filename), unset_fake_temporarily():
            return _Open(original(filename, framework=framework, device="cpu", **more), device, is_begun)

    library.safe_open = safe_open


class _Open:
    """An open file that returns its tensors as shapes."""

    def __init__(self, file: Any, device: Any, is_begun: Callable[[], bool]) -> None:
        self._file = file
        self._is_begun = is_begun
        self._device = f"cuda:{device}" if isinstance(device, int) else device

    def __enter__(self) -> _Open:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor as a fake tensor."""
        with unset_fake_temporarily():
            tensor = self._file.get_tensor(name)
        return self._shape_of(tensor)

    def get_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Returns all tensors as fake tensors, by name."""
        with unset_fake_temporarily():
            tensors = self._file.get_tensors(*args, **kwargs)
        return {name: self._shape_of(tensor) for name, tensor in tensors.items()}

    def get_slice(self, name: str) -> _Slice:
        """Returns a tensor to be sliced."""
        return _Slice(self._file.get_slice(name), self._shape_of)

    def _shape_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch.device(self._device).type == "cpu":
            return mapped(tensor.shape, tensor.stride(), tensor.dtype) if self._is_begun() else tensor
        with unset_fake_temporarily():
            tensor = tensor.to("meta")  # with the strides of the copy that the library makes of a slice of columns
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)


class _Slice:
    """A tensor in a file whose slices are returned as shapes."""

    def __init__(self, part: Any, shape_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._part = part
        self._shape_of = shape_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, key: Any) -> torch.Tensor:
        with unset_fake_temporarily():
            tensor = self._part[key]
        return self._shape_of(tensor)


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
