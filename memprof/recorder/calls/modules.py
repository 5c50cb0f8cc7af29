"""Observes every module call and every backward, by recompiling torch's own functions.

Global forward hooks would do the same, but they route every call through another branch of torch's code: three
more frames and other line numbers in each traceback, and a slower call. The recompiled method keeps torch's
file name, line and column numbers, so a traceback through it is identical, character for character; the original
code object is restored when the window closes.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Container
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from memprof.recorder.calls.tracebacks import recompiled
from memprof.recorder.compiled.uncompiled import skip_compiling
from memprof.trace.files.spool import LOADING, SAVING

Enter = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Exit = Callable[[Any, BaseException | None], None]
_ENTER = "__memprof_enter__"
_EXIT = "__memprof_exit__"
_ID = "__memprof_id__"
_ROOTS = "__memprof_roots__"
#: True for calls that torch.compile traces, as it does where a module's forward was replaced.
_IS_TRACED = "torch.compiler.is_compiling()"
_EVERY_CALL = f"None if {_IS_TRACED} else {_ENTER}(self, args, kwargs)"
#: These tests are all that runs for calls of other modules.
_ROOT_CALLS = f"None if {_IS_TRACED} or {_ID}(self) not in {_ROOTS} else {_ENTER}(self, args, kwargs)"
_BEGIN_BACKWARD, _END_BACKWARD = "__memprof_begin_backward__", "__memprof_end_backward__"
_GRAD = torch._C._functorch.TransformType.Grad


class ModuleCallObserver:
    """Calls `enter(module, args, kwargs)` before and `exit(token, error)` after every nn.Module call, while installed.

    `enter` returns a token, or None if the call is not observed; `exit` is then not called. Both run outside the
    call itself, so neither appears in a traceback of the user's. They must not raise.

    Attributes:
        code: Code of the method while every call is observed.
        root_code: Its code while only calls of selected modules are; None unless requested.
        is_installed: Whether either is installed.
    """

    def __init__(self, enter: Enter, leave: Exit, *, finds_roots: bool = False) -> None:
        """Prepares the recompiled method.

        Args:
            enter: Called before a call.
            leave: Called after it.
            finds_roots: `install_for` will be used.

        Raises:
            RuntimeError: This torch's call method cannot be recompiled.
        """
        self._function: FunctionType = torch.nn.Module._wrapped_call_impl  # type: ignore[assignment]
        self._original: CodeType = self._function.__code__
        self.code: CodeType = recompiled(self._function, partial(wrap_body, entry=_EVERY_CALL, leave=_EXIT))
        self.root_code: CodeType | None = (
            recompiled(self._function, partial(wrap_body, entry=_ROOT_CALLS, leave=_EXIT)) if finds_roots else None
        )
        self._callbacks: dict[str, Any] = {_ENTER: enter, _EXIT: leave, _ID: id, _ROOTS: {}}
        self.is_installed = False

    def install(self) -> None:
        """Starts observing every call."""
        self._install(self.code)

    def install_for(self, ids: Container[int]) -> None:
        """Starts observing only the calls of some modules, given by address.

        If another object has such an address by now, its calls are observed; `enter` distinguishes them.
        """
        assert self.root_code is not None
        self._callbacks[_ROOTS] = ids
        self._install(self.root_code)

    def _install(self, code: CodeType) -> None:
        self._function.__globals__.update(self._callbacks)
        self._function.__code__ = code
        self.is_installed = True

    def remove(self) -> None:
        """Restores torch's own code; calls in progress still end through `exit`."""
        if self.is_installed:
            self._function.__code__ = self._original
            self.is_installed = False


def wrap_body(definition: ast.FunctionDef, entry: str, leave: str) -> None:
    """Wraps a function's body with entry and exit hooks.

    Args:
        definition: The function.
        entry: Expression that returns a token, or None for a call that is not observed.
        leave: Name of the function that is called with the token, and with the error that ends the call or None.
    """
    definition.body = _wrapped(definition.body, entry, leave)


def _wrapped(body: list[ast.stmt], entry_expression: str, leave: str) -> list[ast.stmt]:
    """Returns a wrapped body.

    The names are looked up in torch.nn.modules.module's globals.
    """
    frame = ast.parse(
        f"""
__memprof_token = {entry_expression}
try:
    pass
except BaseException as __memprof_error:
    {leave}(__memprof_token, __memprof_error)
    __memprof_token = None
    raise
finally:
    if __memprof_token is not None:
        {leave}(__memprof_token, None)
"""
    )
    attempt = frame.body[1]
    assert isinstance(attempt, ast.Try)
    attempt.body = body
    first = body[0]
    entry = frame.body[0]
    for node in [
        *ast.walk(entry),
        *(n for part in (attempt.handlers, attempt.finalbody) for s in part for n in ast.walk(s)),
    ]:
        for name, value in (
            ("lineno", first.lineno),
            ("end_lineno", first.lineno),
            ("col_offset", first.col_offset),
            ("end_col_offset", first.col_offset),
        ):
            if hasattr(node, name):
                setattr(node, name, value)
    return [entry, attempt]


def is_within_constructor() -> bool:
    """Whether a module's ``__init__`` is running on this thread.

    Constructors call modules to infer sizes, and parametrizations (weight and spectral norm) to find their originals:
    the enclosing model does not exist yet, and nothing is trained.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# torch's own functions that save and load checkpoints are recompiled with a call before and after their bodies, as
# module calls are, which keeps tracebacks through them as they are.
_BEGIN, _END = "__memprof_begin_storing__", "__memprof_end_storing__"


class StoringObserver:
    """Calls `begin(phase)` before and `end(token, error)` after each call that saves or loads, while installed.

    `begin` returns a token, or None for a call that is not observed; `end` is then not called. Neither may raise.
    """

    def __init__(self, begin: Callable[[int], Any], end: Callable[[Any, BaseException | None], None]) -> None:
        self._callbacks: dict[str, Any] = {_BEGIN: begin, _END: end}
        self._originals: list[tuple[FunctionType, CodeType]] = []

    def install(self) -> None:
        """Starts observing torch's functions; one of another form, of another torch, is left alone."""
        skip_compiling(*self._callbacks.values())
        for phase, functions in (
            (SAVING, (torch.save, torch.nn.Module.state_dict, Optimizer.state_dict)),
            (LOADING, (torch.load, torch.nn.Module.load_state_dict, Optimizer.load_state_dict)),
        ):
            for function in functions:
                own: Any = inspect.unwrap(function)
                if not str(getattr(own, "__module__", "")).startswith("torch."):
                    continue  # replaced by the job: such calls stay in the phase around them
                try:
                    entry = f"None if {_IS_TRACED} else {_BEGIN}({phase})"
                    code = recompiled(own, partial(wrap_body, entry=entry, leave=_END))
                except RuntimeError:
                    continue  # another torch
                own.__globals__.update(self._callbacks)
                self._originals.append((own, own.__code__))
                own.__code__ = code

    def remove(self) -> None:
        """Restores torch's own code; calls in progress still end through `end`."""
        for function, code in self._originals:
            function.__code__ = code
        self._originals.clear()


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
        self._callbacks = {_BEGIN_BACKWARD: self._enter, _END_BACKWARD: end}
        # A dry run on a virtual device wraps it.
        self._function: FunctionType = inspect.unwrap(torch.autograd.graph._engine_run_backward)
        self._original: CodeType | None = None

    def install(self) -> None:
        """Starts observing."""
        entry = f"None if {_IS_TRACED} else {_BEGIN_BACKWARD}(args)"
        code = recompiled(self._function, partial(wrap_body, entry=entry, leave=_END_BACKWARD))
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
