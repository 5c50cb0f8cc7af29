"""Recognizes the job's custom autograd functions on a stack."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
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
            found = code.co_filename.endswith(_FILE) or any(code is each.__code__ for each in _functions("forward"))
            self._known[code] = found
        return found

    def runs_again(self, code: CodeType) -> bool:
        """Whether code is a custom function's backward that runs operators again, as checkpoints do."""
        found = self._known_backwards.get(code)
        if found is None:
            found = any(code is each.__code__ and records_again(each) for each in _functions("backward"))
            self._known_backwards[code] = found
        return found


def records_again(function: FunctionType) -> bool:
    """Whether a function, or one of its module that it names, turns autograd on, which is off in a plain backward."""
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    helpers = [each for each in named if isinstance(each, FunctionType) and each.__module__ == function.__module__]
    return any(not _RECORDS_AGAIN.isdisjoint(each.__code__.co_names) for each in (function, *helpers))


def _functions(name: str) -> Iterator[FunctionType]:
    """Yields the method of a name of every custom function, and what its decorators wrap."""
    pending: list[Any] = [torch.autograd.Function]
    while pending:
        kind = pending.pop()
        pending += type.__subclasses__(kind)
        method = vars(kind).get(name)
        method = getattr(method, "__func__", method)
        while method is not None:
            if isinstance(method, FunctionType):
                yield method
            method = getattr(method, "__wrapped__", None)
