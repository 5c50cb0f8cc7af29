"""What decides which operators a call runs: its arguments, the state of its modules, and torch's modes."""

from __future__ import annotations

import dis
import enum
import functools
import gc
import random
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from memprof.recorder.memory.tensor_memory import modules_of, parameters_of
from memprof.virtual.values.overwritten import stand_in

_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
_SIZED = (list, tuple, dict, set, frozenset)
#: What does not change, or decides no operator: compared by identity.
_FIXED = (type, ModuleType, BuiltinFunctionType, enum.Enum, PurePath, torch.Generator)
#: Containers and objects with more values than this, all of them together, are not compared.
_MOST_VALUES = 4_000
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch._subclasses.fake_tensor.FakeTensor)
#: Code below these folders keeps no state of a job's.
_OWN = tuple(str(Path(path)) + "/" for path in (Path(torch.__file__).parent, Path(__file__).parents[2]))
_STANDARD = str(Path(random.__file__).parent) + "/"
_INSTALLED = ("site-packages", "dist-packages")
#: Attributes of a module in which others than these are its own state.
_TABLES = {"_parameters", "_buffers", "_modules"}
#: Tables of hooks that run with a call or its backward.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UnlikeError(Exception):
    """A call cannot be compared with others: it has arguments or state of an unknown kind."""


def tensor_key(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Returns what matters of a tensor besides its values.

    Raises:
        UnlikeError: It is sparse, of a class of its own, or has hooks.
    """
    if type(tensor) not in _TENSOR_TYPES or tensor.layout is not torch.strided or tensor._backward_hooks:
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
    """Returns the key of the plain state of a module and of those inside it; gradients are not included.

    Raises:
        UnlikeError: It has hooks of the job's, or state that cannot be compared.
    """
    values = Values(owned_by(module))
    of_torch: Any = torch.nn.modules.module
    for name in _HOOKS:
        _refuse_hooks(getattr(of_torch, f"_global{name}"))
    return tuple(tuple(_own_state(each, values)) for each in modules_of(module))


def owned_by(module: torch.nn.Module) -> set[int]:
    """Returns the identities of a module, those inside it, and their parameters."""
    return {id(each) for each in (*modules_of(module), *parameters_of(module))}


def _refuse_hooks(table: dict[int, Any]) -> None:
    for hook in table.values():
        if (getattr(hook, "__module__", None) or "").partition(".")[0] not in ("torch", "memprof"):
            raise UnlikeError


def _own_state(module: torch.nn.Module, values: Values) -> Iterator[Hashable]:
    yield id(type(module))
    for name, value in vars(module).items():
        if name in _HOOKS:
            _refuse_hooks(value)
        elif name not in _TABLES:
            yield name, values.key(value)
    for kind in type(module).__mro__:
        if not (kind.__module__ or "").startswith("torch."):
            yield values.key(kind)
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                yield name, id(tensor), tensor.shape, tensor.dtype, tensor.requires_grad, tensor.layout


class Values:
    """Makes keys of values outside of a call's arguments: each object is looked into once."""

    def __init__(self, owned: set[int]) -> None:
        """Starts with no value.

        Args:
            owned: Identities of modules and parameters that are compared elsewhere.
        """
        self._seen = set(owned)
        self._left = _MOST_VALUES

    def key(self, value: Any) -> Hashable:
        """Returns a plain value, those in a container, object, class or closure, or the identity of what is fixed.

        Raises:
            UnlikeError: It is of an unknown kind, such as an iterator, holds too much, or trains without being owned.
        """
        if isinstance(value, _PLAIN):
            return type(value).__name__, value
        if id(value) in self._seen:
            return id(value)
        if isinstance(value, torch.nn.Module) or (isinstance(value, torch.Tensor) and value.requires_grad):
            raise UnlikeError
        if isinstance(value, torch.Tensor):
            return id(value)
        self._seen.add(id(value))
        found: tuple[Any, ...] = ()
        if isinstance(value, _SIZED):
            found = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
            found = tuple(sorted(found, key=hash)) if isinstance(value, (set, frozenset)) else found
        elif isinstance(value, MethodType):
            found = value.__self__, value.__func__
        elif isinstance(value, functools.partial):
            found = value.func, value.args, value.keywords
        elif isinstance(value, FunctionType):
            found = (*closed_over(value), *(value.__defaults__ or ()), *vars(value).values())
        elif isinstance(value, type):
            own = {} if value.__module__.partition(".")[0] in ("torch", "builtins") else vars(value)
            found = tuple(each for each in own.values() if isinstance(each, (*_PLAIN, *_SIZED)))
        elif not (isinstance(value, _FIXED) or type(value).__module__.startswith("torch._")):
            if not hasattr(value, "__dict__") and not callable(value):
                raise UnlikeError
            found = tuple(vars(value).items()) if hasattr(value, "__dict__") else ()
        self._left -= len(found) + 1
        if self._left < 0:
            raise UnlikeError
        return type(value).__name__, id(value), tuple(self.key(each) for each in found)


def is_plain(value: Any) -> bool:
    """Whether a value that a call returns is a number, a text or the like."""
    return isinstance(value, _PLAIN)


def closed_over(function: FunctionType) -> Iterator[Any]:
    """Yields the values of the variables of its surroundings that a function uses."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None


def gradients_key(parameters: list[torch.Tensor]) -> Hashable:
    """Returns which parameters have a gradient.

    Raises:
        UnlikeError: A gradient is sparse, or a hook of the job runs with it.
    """
    for each in parameters:
        if (
            each._backward_hooks
            or getattr(each, "_post_accumulate_grad_hooks", None)
            or (each.grad is not None and each.grad.layout is not torch.strided)
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
    """The variables that code run by calls reads, global or of functions around it: state outside of its modules."""

    def __init__(self) -> None:
        """Starts with none known."""
        self._read: dict[tuple[int, str], dict[str, Any]] = {}
        self._functions: list[weakref.ref[FunctionType]] = []
        self._codes: set[CodeType] = set()

    def key(self, owned: set[int]) -> Hashable:
        """Returns the values of these variables, those in containers and objects included.

        Args:
            owned: As for `Values`.

        Raises:
            UnlikeError: One cannot be compared.
        """
        values = Values(owned)
        read = tuple(values.key(space.get(name)) for (_, name), space in self._read.items())
        functions = (reference() for reference in self._functions)
        return read, tuple(values.key(each) for each in functions if each is not None)

    def learn(self, function: Callable[[], Any]) -> Any:
        """Runs a function, and notes which variables the code that it runs may read.

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
        if _is_of_libraries(code.co_filename):
            return
        space = frame.f_globals
        names = {each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL}
        for name in names & space.keys():
            value = space[name]
            if isinstance(value, ModuleType):
                if not _is_of_libraries(getattr(value, "__file__", None) or _OWN[0]):
                    inner = vars(value)
                    self._read.update(((id(inner), each), inner) for each in code.co_names if each in inner)
            elif not isinstance(value, _FIXED) or isinstance(value, type):
                self._read[id(space), name] = space
        if code.co_freevars:
            found = [each for each in gc.get_referrers(code) if isinstance(each, FunctionType)]
            self._functions.extend(map(weakref.ref, found))


def _is_of_libraries(file: str) -> bool:
    """Whether code keeps no state of a job's: torch's, memprof's, and the standard library's."""
    return file.startswith(_OWN) or (file.startswith(_STANDARD) and not any(each in file for each in _INSTALLED))
