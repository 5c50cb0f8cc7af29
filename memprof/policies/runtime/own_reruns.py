"""Autograd functions of a job that run part of a model again in backward, as checkpoints written before torch's do."""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any

import torch

from memprof.policies.runtime.replaced import replace_weakly
from memprof.recorder.calls.stacks import records_again

_sequence_number = torch._C._autograd._get_sequence_nr
#: Calls of a model that are remembered: more than backward can still reach in any loop.
_MOST_CALLS = 4096


class OwnReruns:
    """Gives a context to what the job's own functions run again, if their forward was in one of the noted regions.

    torch's checkpoints restore autocast themselves; functions of a job rarely do (torch.amp.custom_bwd would).
    """

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Stores the context; changes nothing.

        Args:
            context: Made anew for each function that runs again.
        """
        self._context = context
        #: First number of autograd nodes in each region, and the one after its last.
        self._regions: deque[tuple[int, int]] = deque(maxlen=_MOST_CALLS)
        #: Whether the backward of a function runs again, read once: each of its nodes asks.
        self._runs_again: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

    def install(self) -> Callable[[], Any]:
        """Starts, for as long as this object lives; returns a function that ends it."""
        return replace_weakly(torch.autograd.function.BackwardCFunction, "apply", self._apply)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Notes the nodes that are made inside."""
        first = _sequence_number()
        try:
            yield
        finally:
            last = _sequence_number()
            if last > first:
                self._regions.append((first, last))

    def _apply(self, before: Any, node: Any, *gradients: Any) -> Any:
        function = type(node)._forward_cls
        if function not in self._runs_again:
            self._runs_again[function] = _runs_again(function)
        if not self._runs_again[function]:
            return before(node, *gradients)
        number = node._sequence_nr()
        if not any(first <= number < last for first, last in self._regions):
            return before(node, *gradients)
        with self._context():
            return before(node, *gradients)


def _runs_again(function: type[torch.autograd.Function]) -> bool:
    backward = inspect.unwrap(function.backward)
    return isinstance(backward, FunctionType) and records_again(backward)
