"""Functions of torch that plans have wrapped, and torch's own tensor types, to which the wrapping applies."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, MethodType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

Wrap = Callable[[Any], Any]
#: Types that policies treat as plain memory. Subclasses may hold anything and are left alone.
OWN_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_Tensor = torch.Tensor
#: Functions, as ``__torch_function__`` is given them, that read no values of a tensor.
WITHOUT_VALUES = frozenset(
    {getattr(_Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu")}
    | {getattr(_Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "is_sparse", "is_meta")}
    | {getattr(_Tensor, name) for name in ("size", "dim", "numel", "nelement", "ndimension", "stride", "__len__")}
    | {getattr(_Tensor, name) for name in ("is_floating_point", "is_complex", "is_contiguous", "element_size")}
    | {torch.is_floating_point, torch.is_complex, torch.numel}
)


def replace(owner: Any, name: str, wrap: Wrap) -> Callable[[], None]:
    """Replaces a function by one made from it.

    Args:
        owner: Its owner: a module or a class of torch, or a cell.
        name: Its name there; ``cell_contents`` for a cell.
        wrap: Takes the current function and returns the new one; called again when an inner layer is removed.

    Returns:
        A function that removes this layer; layers added around it since stay, including those of other libraries.
    """
    current = getattr(owner, name)
    replaced = getattr(current, "replaced", None)
    # Other libraries that wrap ours copy its attributes.
    if not isinstance(replaced, _Replaced) or replaced.function is not current:
        replaced = _Replaced(owner, name)
    return replaced.add(wrap)


def replace_method(instance: Any, name: str, call: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of one object, such as an optimizer's ``step``.

    Args:
        instance: The object.
        name: The method's name.
        call: Called with the arguments of the call, without the object.

    Returns:
        A function that lets calls through again; wrappers that others have put around the method since remain.
    """
    before, own = getattr(instance, name), vars(instance).get(name)
    is_on = True

    @functools.wraps(before)  # keeps the marks that LR schedulers leave on it and look for
    def method(_: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if is_on else before(*args, **kwargs)

    # A method, not a function: an LR scheduler created later takes step.__func__.
    vars(instance)[name] = mine = MethodType(method, instance)

    def restore() -> None:
        nonlocal is_on
        is_on = False
        if vars(instance).get(name) is mine:
            if own is None:
                del vars(instance)[name]
            else:
                vars(instance)[name] = own

    return restore


def replace_weakly(owner: Any, name: str, method: Any) -> Callable[[], Any]:
    """Replaces a function by a bound method for as long as its object lives.

    Replacements in torch last for the whole process, and must not keep alive a model that the job has dropped.

    Args:
        owner: Owner of the function, as for `replace`.
        name: Its name there.
        method: Called with the current function, and with the arguments of the call.

    Returns:
        A function that removes it.
    """
    reference = weakref.WeakMethod(method)

    def wrap(before: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            alive = reference()
            return before(*args, **kwargs) if alive is None else alive(before, *args, **kwargs)

        return call

    return until_gone(method.__self__, replace(owner, name, wrap))


def hook_weakly(register: Callable[[Any], RemovableHandle], method: Any) -> Callable[[], Any]:
    """Registers a bound method as a hook of the whole process, for as long as its object lives.

    Args:
        register: ``register_optimizer_step_pre_hook``, for instance.
        method: The hook.

    Returns:
        A function that removes it.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args, **kwargs)

    return until_gone(method.__self__, register(call).remove)


def until_gone(owner: Any, undo: Callable[[], Any]) -> Callable[[], Any]:
    """Runs an undo action once its owner is gone, such as a model that the job has dropped.

    Args:
        owner: The owner.
        undo: The undo action; it must not hold the owner.

    Returns:
        Runs it now, unless it has run.
    """
    finalizer = weakref.finalize(owner, undo)
    finalizer.atexit = False
    return finalizer


def cell_of_body(function: Any) -> CellType:
    """Returns the cell of a ``torch.nn.utils.clip_grad`` function that holds its body, run under ``no_grad``.

    A script that imported the function by name also calls what is in this cell.
    """
    while "func" not in function.__code__.co_freevars:
        function = function.__wrapped__
    cells: dict[str, CellType] = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return cells["func"]


@dataclass(eq=False)
class _Layer:
    wrap: Wrap


class _Replaced:
    """One function and the layers around it.

    Attributes:
        function: The replacement.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._is_own = isinstance(owner, CellType) or name in vars(owner)
        self._before = self._outermost = getattr(owner, name)
        self._layers: list[_Layer] = []

        @functools.wraps(self._before)
        def function(*args: Any, **kwargs: Any) -> Any:
            return self._outermost(*args, **kwargs)

        function.replaced = self  # type: ignore[attr-defined]
        self.function = function
        setattr(owner, name, function)

    def add(self, wrap: Wrap) -> Callable[[], None]:
        """Adds a layer around the others; returns a function that removes it."""
        layer = _Layer(wrap)
        self._layers.append(layer)
        self._wrap(layer)
        return functools.partial(self._remove, layer)

    def _wrap(self, layer: _Layer) -> None:
        self._outermost = functools.update_wrapper(layer.wrap(self._outermost), self._outermost)

    def _remove(self, layer: _Layer) -> None:
        self._layers.remove(layer)
        self._outermost = self._before
        for each in self._layers:
            self._wrap(each)
        if not self._layers and getattr(self._owner, self._name) is self.function:
            if self._is_own:
                setattr(self._owner, self._name, self._before)
            else:
                delattr(self._owner, self._name)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values to read; those of a dry run have none."""
    return not isinstance(tensor, FakeTensor)


def is_dry_run() -> bool:
    """Whether this is a dry run: tensors are created without memory."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_in_transform() -> bool:
    """Whether a transform of torch.func is under way (grad, vmap, jvp), whose tensors have no memory of their own."""
    return torch._C._functorch.peek_interpreter_stack() is not None
