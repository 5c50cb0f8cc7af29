"""Logits that are materialized on first access: cross-entropy reads them chunk by chunk instead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from memprof.policies.runtime.replaced import WITHOUT_VALUES

Tensor = torch.Tensor
InUse = Callable[[], AbstractContextManager[None]]


def make_logits(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Computes the logits of some rows."""
    return F.linear(rows, matrix, bias)


def make_float_logits(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Computes the logits of some rows in 32 bits, as ``logits.float()`` would."""
    return F.linear(rows, matrix, bias).float()


def lazy_logits(layer: torch.nn.Linear, hidden: Tensor, in_use: InUse) -> LazyLogits:
    """Returns the deferred result of a Linear for an input; casts as autocast would.

    Args:
        layer: The Linear.
        hidden: Its input.
        in_use: Returns a context in which the layer's parameters can be read after its forward has ended.
    """
    matrix: Tensor = layer.weight
    bias: Tensor | None = layer.bias
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        to = torch.get_autocast_dtype(kind)
        with in_use():
            hidden, matrix, bias = hidden.to(to), matrix.to(to), None if bias is None else bias.to(to)
    return _lazy(hidden, matrix, bias, make_logits, in_use)


class LazyLogits(torch.Tensor):
    """A tensor of the logits' shape that can materialize them.

    Its sizes and dtype can be read, and its rows viewed and sliced, without materializing anything. Any other access
    materializes the logits, once. For autograd it is the output of the Linear, whichever way it is used.
    """

    hidden: Tensor
    matrix: Tensor
    bias: Tensor | None
    make: Callable[..., Tensor]
    made: Tensor | None
    in_use: InUse

    @staticmethod
    def around(hidden: Tensor, matrix: Tensor, bias: Tensor | None, make: Callable[..., Tensor]) -> LazyLogits:
        """Creates one outside autograd."""
        shape = (*hidden.shape[:-1], matrix.shape[0])
        dtype = torch.float32 if make is make_float_logits else matrix.dtype
        lazy: LazyLogits = torch.Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=hidden.device)
        lazy.hidden, lazy.matrix, lazy.bias, lazy.make, lazy.made = hidden, matrix, bias, make, None
        return lazy

    def logits(self) -> Tensor:
        """Computes the logits, once; differentiable, as those of the Linear are, whoever reads them first."""
        if self.made is None:
            with torch.inference_mode(False), torch.enable_grad(), self.in_use():
                self.made = self.make(self.hidden, self.matrix, self.bias)
        return self.made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handles functions that need no logits, views rows, and passes the logits to all others."""
        kwargs = kwargs or {}
        if func in WITHOUT_VALUES or func in (torch.autograd.backward, torch.autograd.grad):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        view = _VIEWS.get(func)
        if view is not None and isinstance(args[0], cls) and args[0].made is None:
            viewed = view(args[0], *args[1:], **kwargs)
            if viewed is not None:
                return viewed

        def real(value: Any) -> Any:
            return value.logits() if isinstance(value, LazyLogits) else value

        return func(*tree_map(real, args), **tree_map(real, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Passes the logits to operators below Python's functions; autograd has its node above."""

        def real(value: Any) -> Any:
            return value.logits().detach() if isinstance(value, LazyLogits) else value

        return func(*tree_map(real, args), **tree_map(real, kwargs or {}))


class _Link(torch.autograd.Function):
    """Connects lazy logits to autograd's graph, for uses that bypass Python's functions."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, matrix: Tensor, bias: Tensor | None, make: Callable[..., Tensor]
    ) -> LazyLogits:
        ctx.save_for_backward(hidden, matrix, bias)
        ctx.make = make
        return LazyLogits.around(hidden, matrix, bias, make)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: the gradients are differentiated, too
            wanted = [x for x, needs in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False) if needs]
            logits = ctx.make(*ctx.saved_tensors)
            found = iter(torch.autograd.grad(logits, wanted, upstream, create_graph=True))
            return (*(next(found) if needs else None for needs in ctx.needs_input_grad[:3]), None)
        with torch.enable_grad():
            inputs = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
            logits = ctx.make(*inputs)
        wanted = [x for x in inputs if x is not None]
        gradients = iter(torch.autograd.grad(logits, wanted, upstream))
        return (*(None if x is None else next(gradients) for x in inputs), None)


def _lazy(
    hidden: Tensor, matrix: Tensor, bias: Tensor | None, make: Callable[..., Tensor], in_use: InUse
) -> LazyLogits:
    apply: Callable[..., LazyLogits] = _Link.apply
    with in_use():
        lazy = apply(hidden, matrix, bias, make)
    # The outputs of the node are created inside it, with gradients disabled: the logits need the outer tensors.
    lazy.hidden, lazy.matrix, lazy.bias, lazy.make, lazy.made = hidden, matrix, bias, make, None
    lazy.in_use = in_use
    return lazy


def _with_rows(lazy: LazyLogits, hidden: Tensor) -> LazyLogits:
    return _lazy(hidden, lazy.matrix, lazy.bias, lazy.make, lazy.in_use)


def _flatten(lazy: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> LazyLogits | None:
    dims = lazy.hidden.dim()
    start, end = start_dim % dims, end_dim % dims
    return _with_rows(lazy, lazy.hidden.flatten(start, end)) if start <= end < dims - 1 else None


def _reshape(lazy: LazyLogits, *shape: Any, **named: Any) -> LazyLogits | None:
    if named or not shape:
        return None
    sizes = list(shape[0] if isinstance(shape[0], list | tuple) else shape)
    if not all(isinstance(size, int) for size in sizes):
        return None  # view(dtype)
    classes, features = lazy.matrix.shape
    rows = lazy.hidden.numel() // max(features, 1)
    if sizes.count(-1) == 1 and sizes[-1] == -1:
        known = 1
        for size in sizes[:-1]:
            known *= size
        if known != rows:
            return None
    elif sizes[-1] != classes:
        return None
    return _with_rows(lazy, lazy.hidden.reshape(*sizes[:-1], features))


def _slice(lazy: LazyLogits, key: Any) -> LazyLogits | None:
    """Slices rows, as in ``logits[..., :-1, :]``; operations on the classes need the logits."""
    keys = key if isinstance(key, tuple) else (key,)
    dims = lazy.hidden.dim()
    if not all(isinstance(one, slice | int) or one is Ellipsis for one in keys):
        return None
    if keys.count(Ellipsis) > 1 or len(keys) - keys.count(Ellipsis) > dims:
        return None
    reaches_classes = keys[-1] is not Ellipsis and (Ellipsis in keys or len(keys) == dims)
    if reaches_classes and keys[-1] != slice(None):
        return None
    return _with_rows(lazy, lazy.hidden[key])


def _same(lazy: LazyLogits, **named: Any) -> LazyLogits | None:
    return None if named else lazy


def _float(lazy: LazyLogits, **named: Any) -> LazyLogits | None:
    return None if named else _lazy(lazy.hidden, lazy.matrix, lazy.bias, make_float_logits, lazy.in_use)


def _to(lazy: LazyLogits, *what: Any, **named: Any) -> LazyLogits | None:
    """Handles ``to(torch.float32)``; for other types and devices, converts the logits themselves."""
    is_float = (what, named) in (((torch.float32,), {}), ((), {"dtype": torch.float32}))
    return _float(lazy) if is_float else None


_VIEWS: dict[Any, Callable[..., LazyLogits | None]] = {
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.__getitem__: _slice,
    Tensor.contiguous: _same,
    Tensor.float: _float,
    Tensor.to: _to,
}
