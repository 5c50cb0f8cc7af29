"""Runs in place the operators that torch runs in place on plain tensors, but out of place on subclasses.

Those are the operators of memprof.trace.zero_filling: fake tensors are a subclass.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from memprof.trace.zero_filling import FILLING, ZEROS

#: Makes the stand-in for an argument with data, such as an index of the processor: between the zeros and their filling.
_LENDING = torch.ops.aten.empty_strided.default


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
        name = str(func)
        if known is not None and name in FILLING and known is args[0] and known.shape == result.shape:
            return known
        if name in ZEROS and isinstance(result, torch.Tensor):
            self._zeros = weakref.ref(result)
        return result
