"""Recognizes the job's custom autograd functions on a stack."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

#: Where torch calls them, up to 2.13. Since 2.14 that is C++, without a frame.
_FILE = ("autograd/function.py", "autograd\\function.py")


class FunctionCode:
    """Recognizes code that runs with gradients off because torch calls it as a function's forward."""

    def __init__(self) -> None:
        """Starts without known code."""
        self._known: dict[CodeType, bool] = {}

    def is_in(self, code: CodeType) -> bool:
        """Whether code is torch's that calls a custom autograd function, or the forward of one that exists."""
        found = self._known.get(code)
        if found is None:
            found = code.co_filename.endswith(_FILE) or any(code is each for each in _forwards())
            self._known[code] = found
        return found


def _forwards() -> Iterator[CodeType]:
    """Yields the code of every function's forward, and of what its decorators wrap."""
    pending: list[Any] = [torch.autograd.Function]
    while pending:
        kind = pending.pop()
        pending += type.__subclasses__(kind)
        forward = vars(kind).get("forward")
        forward = getattr(forward, "__func__", forward)
        while forward is not None:
            code = getattr(forward, "__code__", None)
            if isinstance(code, CodeType):
                yield code
            forward = getattr(forward, "__wrapped__", None)
