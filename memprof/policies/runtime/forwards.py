"""Wraps forwards for a plan: layers around the job's own, on one module but not on its copies."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from memprof.policies.runtime.copies import CopyGuard, rebound

Forward = Callable[..., Any]
Wrap = Callable[[Forward], Forward]

_FORWARD = "forward"


@dataclass(eq=False)
class _Layer:
    """A layer's wrap function, the forward it produced, and whether torch.export traces it too."""

    wrap: Wrap
    forward: Forward
    is_exported: bool


class PlannedForward:
    """Replacement for a module's forward.

    ``module.forward`` stays a bound method with the signature and the source of the job's own. Called for another
    module, a copy, it runs the job's own forward on that.

    Attributes:
        top: The outermost layer, None where all have been removed.
        exported: The outermost layer of those that torch.export traces, None without any.
    """

    def __init__(self, module: torch.nn.Module, guard: CopyGuard) -> None:
        self.top: Forward | None = None
        self.exported: Forward | None = None
        self._module = module
        self._guard = guard
        self._own = vars(module).get(_FORWARD)  # a forward of the instance, as set by accelerate and peft
        self._base: Forward = module.forward
        self._layers: list[_Layer] = []
        self._method = _method(self)
        guard.put(_FORWARD, self._method)

    @staticmethod
    def add(
        module: torch.nn.Module, wrap: Wrap, *, innermost: bool = False, in_export: bool = False
    ) -> Callable[[], None]:
        """Adds a layer around a module's forward; it becomes the outermost, or the innermost.

        Args:
            module: The module.
            wrap: Takes the current forward and returns the new one.
            innermost: Add it directly around the job's own forward.
            in_export: Have torch.export trace it: the model does not run without.

        Returns:
            A function that removes the layer; others around it stay.
        """
        guard = CopyGuard.of(module)
        if guard.forward is None:
            guard.forward = PlannedForward(module, guard)
        planned: PlannedForward = guard.forward
        layer = _Layer(wrap, planned._base, in_export)
        place = 0 if innermost else len(planned._layers)
        planned._layers.insert(place, layer)
        planned._wrap_from(place)
        return functools.partial(planned._remove, layer)

    def plain(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs the job's own forward on a module that is this one or a copy of it."""
        if self._own is None:
            return type(module).forward(module, *args, **kwargs)
        return rebound(self._own, self._module, module)(*args, **kwargs)

    def _remove(self, layer: _Layer) -> None:
        place = self._layers.index(layer)
        del self._layers[place]
        self._wrap_from(place)
        if not self._layers:
            self._guard.forward = None
            self._guard.take(self._method)
        self._guard.release()

    def _wrap_from(self, place: int) -> None:
        """Makes the forwards of a layer and of those around it anew."""
        inner = self._layers[place - 1].forward if place else self._base
        for layer in self._layers[place:]:
            inner = layer.forward = layer.wrap(inner)
        self.top = inner if self._layers else None
        self.exported = None
        for layer in self._layers:
            if layer.is_exported:
                self.exported = layer.wrap(self.exported or self._base)


def outermost_layer(module: torch.nn.Module) -> Forward | None:
    """Returns the outermost layer around a module's forward, None without one."""
    guard = CopyGuard.find(module)
    top: Forward | None = None if guard is None or guard.forward is None else guard.forward.top
    return top


def _method(planned: PlannedForward) -> Any:
    """Returns the function of the bound method that a module has as its forward."""
    owner, own = planned._module, planned._own
    function = type(owner).forward if own is None else getattr(own, "__func__", own)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.export traces the model without the parts of the plan that only concern training.
        top = planned.exported if torch.compiler.is_exporting() else planned.top
        if top is None or self is not owner:
            return planned.plain(self, *args, **kwargs)
        return top(*args, **kwargs)

    functools.update_wrapper(forward, function, updated=())
    forward.__name__ = _FORWARD  # by which a bound method is pickled
    # A function of the instance has no self, which is taken from the signature of a method.
    lacks_self = own is not None and not isinstance(own, types.MethodType)
    if lacks_self:
        del forward.__wrapped__  # type: ignore[attr-defined]
    with suppress(TypeError, ValueError):  # the job's own has no signature then, either
        # Read by functions that do not follow __wrapped__, such as inspect.getfullargspec.
        signature = inspect.signature(function)
        first = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)] if lacks_self else []
        forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*first, *signature.parameters.values()]
        )
    return forward
