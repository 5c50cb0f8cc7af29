"""Recognizes the job's custom autograd functions on a stack."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

#: Where torch calls them, up to 2.13. Since 2.14 that is C++, without a frame.
_FILE = ("autograd/function.py", "autograd\\function.py")


#: What a backward calls to run operators again that autograd records.
_RECORDS_AGAIN = frozenset(("enable_grad", "set_grad_enabled"))


class FunctionCode:
    """Recognizes code that torch calls as a custom function's forward, with gradients off, or as its backward."""

    def __init__(self) -> None:
        """Starts without known code."""
        self._known: dict[CodeType, bool] = {}
        self._known_backwards: dict[CodeType, bool] = {}

    def is_in(self, code: CodeType) -> bool:
        """Whether code is torch's that calls a custom autograd function, or the forward of one that exists."""
        found = self._known.get(code)
        if found is None:
            found = code.co_filename.endswith(_FILE) or any(code is each for each in _codes("forward"))
            self._known[code] = found
        return found

    def runs_again(self, code: CodeType) -> bool:
        """Whether code is a custom function's backward that runs operators again, as checkpoints do."""
        found = self._known_backwards.get(code)
        if found is None:
            found = records_again(code) and any(code is each for each in _codes("backward"))
            self._known_backwards[code] = found
        return found


def records_again(code: CodeType) -> bool:
    """Whether code turns autograd on, which is off in a backward that is not differentiated in turn."""
    return not _RECORDS_AGAIN.isdisjoint(code.co_names)


def _codes(name: str) -> Iterator[CodeType]:
    """Yields the code of every function's method of a name, and of what its decorators wrap."""
    pending: list[Any] = [torch.autograd.Function]
    while pending:
        kind = pending.pop()
        pending += type.__subclasses__(kind)
        method = vars(kind).get(name)
        method = getattr(method, "__func__", method)
        while method is not None:
            code = getattr(method, "__code__", None)
            if isinstance(code, CodeType):
                yield code
            method = getattr(method, "__wrapped__", None)
