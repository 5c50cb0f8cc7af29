"""Observes every module call by recompiling torch's own call method with hooks before and after the call.

Global forward hooks would do the same, but they route every call through another branch of torch's code: three
more frames and other line numbers in each traceback, and a slower call. The recompiled method keeps torch's
file name, line and column numbers, so a traceback through it is identical, character for character; the original
code object is restored when the window closes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch

from memprof.recorder.calls.recompiled import recompiled

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
