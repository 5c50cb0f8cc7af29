"""Tells tensors that a custom autograd function saves from those of torch's operators."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

_Function: Any = torch.autograd.Function
#: The frame that calls a function and saves its tensors, up to torch 2.13; since then it is C++, without a frame.
_FRAME = getattr(getattr(_Function.apply, "__func__", None), "__code__", None)
#: torch's own function, while calls are followed.
_replaced: list[Any] = []


class FunctionCalls(threading.local):
    """Whether a custom autograd function is being called in this thread.

    Attributes:
        depth: How many are, one inside another.
    """

    depth = 0

    def begin(self) -> None:
        """Follows the calls of every function from now on, where no frame shows them."""
        if _FRAME is not None:
            return
        before, calls = vars(_Function)["apply"], self

        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            calls.depth += 1
            try:
                return before.__get__(None, kind)(*args, **kwargs)
            finally:
                calls.depth -= 1

        _replaced.append(before)
        _Function.apply = classmethod(apply)

    def end(self) -> None:
        """Stops following."""
        if _FRAME is None:
            _Function.apply = _replaced.pop()

    def saves(self) -> bool:
        """Returns whether the hook that calls this packs a tensor of a function, whose operators save none."""
        return self.depth > 0 or (_FRAME is not None and sys._getframe(2).f_code is _FRAME)
