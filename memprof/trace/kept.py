"""Keeps what is derived from a step or a table as long as that lives: a search derives it for thousands of plans."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

_Of = TypeVar("_Of")
_More = ParamSpec("_More")
_Result = TypeVar("_Result")


def kept(function: Callable[Concatenate[_Of, _More], _Result]) -> Callable[Concatenate[_Of, _More], _Result]:
    """Makes a function compute its result once for each first argument, by identity, and other, hashable arguments.

    What it returns must not be changed, nor hold the first argument.
    """
    results: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def looked_up(of: _Of, /, *more: _More.args, **named: _More.kwargs) -> _Result:
        known = results.setdefault(of, {})
        key = (more, *named.items())
        if key not in known:
            known[key] = function(of, *more, **named)
        result: _Result = known[key]
        return result

    return looked_up
