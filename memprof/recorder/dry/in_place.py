"""Runs in place what torch runs in place where tensors are its own, and anew where they are of a subclass.

Formulas of backward fill zeros that nobody else holds: ``gather_backward`` adds into them, ``index_backward`` puts into
them (torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike). To tensors without memory, which are of a
subclass, torch applies the operators that return new tensors.
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


class InPlace:
    """Remembers the zeros that an operator of backward made last."""

    def __init__(self) -> None:
        """Has seen none yet."""
        self._zeros: weakref.ref[torch.Tensor] | None = None

    def result(self, func: Any, args: Any, result: Any) -> Any:
        """Returns what an operator returns: the zeros that it is given, where they are backward's own and fresh.

        Args:
            func: The operator.
            args: Its arguments.
            result: What it returned, without memory.
        """
        zeros, self._zeros = self._zeros, None
        if torch._C._current_graph_task_id() == -1:
            return result
        known = zeros() if zeros is not None else None
        if known is not None and func in _FILLING and known is args[0] and known.shape == result.shape:
            return known
        if getattr(func, "overloadpacket", None) in _ZEROS and isinstance(result, torch.Tensor):
            self._zeros = weakref.ref(result)
        return result
