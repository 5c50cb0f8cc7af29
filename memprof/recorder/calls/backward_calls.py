"""Observes every backward that Python starts, by recompiling the function of torch's that runs autograd's engine."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from memprof.recorder.calls.modules import wrap_body
from memprof.recorder.calls.recompiled import recompiled

_ENTER, _EXIT = "__memprof_begin_backward__", "__memprof_end_backward__"
_GRAD = torch._C._functorch.TransformType.Grad


class BackwardCalls:
    """Calls `begin(goes_on)` before, and `end(token, error)` after every backward outside others, while installed.

    `goes_on` says that the gradients are to be differentiated again: a later backward belongs to the same step. `begin`
    returns a token, or None for a call that is not observed. Neither may raise.
    """

    def __init__(self, begin: Callable[[bool], Any], end: Callable[[Any, BaseException | None], None]) -> None:
        """Prepares the recompiled function.

        Args:
            begin: Called before a backward.
            end: Called after it.
        """
        self._begin = begin
        self._callbacks = {_ENTER: self._enter, _EXIT: end}
        # A dry run on a virtual device wraps it.
        self._function: FunctionType = inspect.unwrap(torch.autograd.graph._engine_run_backward)
        self._original: CodeType | None = None

    def install(self) -> None:
        """Starts observing."""
        entry = f"None if torch.compiler.is_compiling() else {_ENTER}(args)"
        code = recompiled(self._function, partial(wrap_body, entry=entry, leave=_EXIT))
        self._function.__globals__.update(self._callbacks)
        self._original, self._function.__code__ = self._function.__code__, code

    def remove(self) -> None:
        """Restores torch's own code; a backward in progress still ends through `end`."""
        if self._original is not None:
            self._function.__code__, self._original = self._original, None

    def _enter(self, args: tuple[Any, ...]) -> Any:
        if torch._C._current_graph_task_id() != -1 or _is_checked():
            return None
        # Before the fourth argument: gradients of the outputs, whether to keep the graph, whether to make another.
        # Transforms of torch.func always make another; those inside others are differentiated again.
        transforms = torch._C._functorch.get_interpreter_stack() or ()
        derivatives = sum(each.key() == _GRAD for each in transforms)
        return self._begin(derivatives > 1 if derivatives else len(args) > 2 and bool(args[2]))


def _is_checked() -> bool:
    """Whether ``torch.autograd.gradcheck`` runs, which repeats a backward many times."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "gradcheck":
        frame = frame.f_back
    return frame is not None
