"""What decides which operators a call runs: its arguments, the state of its modules, and torch's modes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from memprof.recorder.memory.tensor_memory import modules_of
from memprof.virtual.values.overwritten import stand_in

_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
_SIZED = (list, tuple, dict, set)
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch._subclasses.fake_tensor.FakeTensor)
#: Code below these folders keeps no state of a job's.
_OWN = tuple(str(Path(path)) + "/" for path in (Path(torch.__file__).parent, Path(__file__).parents[2]))
_STANDARD = str(Path(random.__file__).parent) + "/"
_INSTALLED = ("site-packages", "dist-packages")
#: Attributes of a module in which others than these are its own state.
_TABLES = {"_parameters", "_buffers", "_modules"}


class UnlikeError(Exception):
    """A call cannot be compared with others: it has arguments or state of an unknown kind."""


def tensor_key(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Returns what matters of a tensor besides its values.

    Raises:
        UnlikeError: It is sparse, or of a class of its own.
    """
    if type(tensor) not in _TENSOR_TYPES or tensor.layout is not torch.strided:
        raise UnlikeError
    is_data = not isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor) and stand_in(tensor) is None
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        str(tensor.device),
        tensor.requires_grad,
        tensor.is_leaf,
        is_data,
    )


def arguments_key(args: Any, kwargs: Any) -> tuple[Hashable, list[torch.Tensor]]:
    """Returns the key of a call's arguments, and their tensors.

    Raises:
        UnlikeError: An argument is neither a tensor nor a plain value.
    """
    leaves, spec = tree_flatten((args, kwargs))
    tensors, keys = [], []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            keys.append(tensor_key(leaf))
        elif isinstance(leaf, _PLAIN):
            keys.append((type(leaf).__name__, leaf))
        else:
            raise UnlikeError
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    aliases = tuple(storages.index(each) for each in storages)
    return (str(spec), tuple(keys), aliases), tensors


def state_key(module: torch.nn.Module) -> Hashable:
    """Returns the key of the plain state of a module and of those inside it; gradients are not included."""
    return tuple(tuple(_own_state(each)) for each in modules_of(module))


def _own_state(module: torch.nn.Module) -> Iterator[Hashable]:
    yield id(type(module))
    for name, value in vars(module).items():
        if name not in _TABLES:
            yield name, plain_key(value)
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                yield name, id(tensor), tensor.shape, tensor.dtype, tensor.requires_grad, tensor.layout


def plain_key(value: Any) -> Hashable:
    """Returns a plain value, the length of a container, the shape of a tensor, the identity of all else."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, _SIZED):
        inner = tuple(each for each in value.values() if isinstance(each, _PLAIN)) if isinstance(value, dict) else ()
        return type(value).__name__, len(value), inner
    return id(value)


def gradients_key(parameters: list[torch.Tensor]) -> Hashable:
    """Returns which parameters have a gradient.

    Raises:
        UnlikeError: A gradient is sparse, or a hook of the job runs when it is complete.
    """
    for each in parameters:
        if getattr(each, "_post_accumulate_grad_hooks", None) or (
            each.grad is not None and each.grad.layout is not torch.strided
        ):
            raise UnlikeError
    return tuple(each.grad is not None for each in parameters)


def modes_key() -> Hashable:
    """Returns the state of torch that decides which operators run.

    Raises:
        UnlikeError: Hooks of the job take what autograd saves.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise UnlikeError
    kinds = ("cpu", "cuda")
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_default_dtype()


class Surroundings:
    """The global variables that code run by calls reads: counters and lists outside of the model's modules."""

    def __init__(self) -> None:
        """Starts with none known."""
        self._read: dict[tuple[int, str], dict[str, Any]] = {}
        self._codes: set[CodeType] = set()

    def key(self) -> Hashable:
        """Returns the values of those that are plain, and the lengths of containers."""
        return tuple(_visible(space.get(name)) for (_, name), space in self._read.items())

    def learn(self, function: Callable[[], Any]) -> Any:
        """Runs a function, and notes which global variables the code that it runs may read.

        Args:
            function: The function.

        Returns:
            Its result.
        """
        sys.setprofile(self._see)
        try:
            return function()
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._codes:
            return
        self._codes.add(code)
        file = code.co_filename
        if file.startswith(_OWN) or (file.startswith(_STANDARD) and not any(each in file for each in _INSTALLED)):
            return
        space = frame.f_globals
        for name in code.co_names:
            if name in space and _is_state(space[name]):
                self._read[id(space), name] = space


def _is_state(value: Any) -> bool:
    if isinstance(value, (*_PLAIN, *_SIZED)):
        return True
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, type(sys))


def _visible(value: Any) -> Hashable:
    if isinstance(value, (*_PLAIN, *_SIZED)) or not hasattr(value, "__dict__"):
        return plain_key(value)
    return tuple((name, plain_key(each)) for name, each in vars(value).items())
