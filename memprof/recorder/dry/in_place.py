"""Runs in place the operators that torch runs in place on plain tensors, but out of place on subclasses.

Formulas of backward fill fresh zeros: ``gather_backward`` adds into them, ``index_backward`` puts into them
(torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike). For fake tensors, which are a subclass, torch
uses the operators that return new tensors.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_aten = torch.ops.aten
_ZEROS = {_aten.zeros, _aten.new_zeros, _aten.zeros_like}
_FILLING = {
    _aten.scatter_add.default,
    _aten.scatter.src,
    _aten.index_add.default,
    _aten.index_put.default,
    _aten.masked_scatter.default,
    _aten.slice_scatter.default,
}

#: Makes the stand-in for an argument with data, such as an index of the processor: between the zeros and their filling.
_LENDING = _aten.empty_strided.default


class InPlace:
    """Tracks the zeros that an operator of backward created last."""

    def __init__(self) -> None:
        """Starts with no zeros seen."""
        self._zeros: weakref.ref[torch.Tensor] | None = None

    def result(self, func: Any, args: Any, result: Any) -> Any:
        """Returns an operator's result: the zeros passed to it, if they are backward's own and fresh.

        Args:
            func: The operator.
            args: Its arguments.
            result: Its result, a fake tensor.
        """
        if func is _LENDING:
            return result
        zeros, self._zeros = self._zeros, None
        if torch._C._current_graph_task_id() == -1:
            return result
        known = zeros() if zeros is not None else None
        if known is not None and func in _FILLING and known is args[0] and known.shape == result.shape:
            return known
        if getattr(func, "overloadpacket", None) in _ZEROS and isinstance(result, torch.Tensor):
            self._zeros = weakref.ref(result)
        return result
