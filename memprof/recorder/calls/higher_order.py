"""Passes higher-order operators (cond, scan, flex_attention ...) through a dispatch mode, which sees what they run.

torch dispatches a higher-order operator to the modes of the stack one by one. The remainder is a Python function
that runs ordinary operators with no mode on the stack. Here the modes are restored for it, so that they see those
operators like any others. Some of these functions require an empty stack: for them the modes are restored when the
first function passed to the operator is called, and stay until it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator

#: Torch's own operators whose function runs under any stack.
_OPEN = frozenset(
    {
        "associative_scan",
        "auto_functionalized",
        "auto_functionalized_v2",
        "flex_attention",
        "flex_attention_backward",
        "graphsafe_run_with_rng_state",
        "hints_wrapper",
        "inductor_compiled_code",
        "local_map_hop",
        "map_impl",
        "out_dtype",
        "run_and_save_rng_state",
        "run_const_graph",
        "run_with_rng_state",
        "while_loop",
        "while_loop_stack_output",
        "with_effects",
    }
)
#: Operators that require an empty stack; so do all subclasses of torch's BaseHOP.
_STRICT = frozenset({"cond", "invoke_subgraph", "scan", "strict_mode"})
_BASE_RULE = "_call_CompositeExplicitAutograd"
_OPERATORS = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket, torch.Tensor)


class Mode(Protocol):
    """One of memprof's dispatch modes, which can be pushed and removed while operators run.

    Attributes:
        is_followed: True, which marks the mode as memprof's.
        fake_type: Type of the fake tensors that it runs operators on; None if there is none.
    """

    is_followed: bool
    fake_type: type | None

    def put(self) -> None:
        """Pushes the mode on the stack."""

    def take(self) -> None:
        """Removes the mode from wherever it is on the stack."""


def is_higher_order(func: Any) -> bool:
    """Whether an operator is higher-order: it takes functions, not only tensors."""
    return isinstance(func, HigherOrderOperator)


def is_traced() -> bool:
    """Whether a mode other than memprof's is left on the stack: torch's own, which traces operators."""
    return not all(getattr(mode, "is_followed", False) for mode in _stack())


def follow(mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a higher-order operator with all of memprof's modes active for the operators inside.

    Args:
        mode: The dispatching mode, which torch has popped from the stack; all modes left there are memprof's.
        func: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The operator's result; NotImplemented, without running anything, if it cannot be followed.
    """
    is_strict = func._name in _STRICT or hasattr(func, _BASE_RULE)
    if not is_strict and func._name not in _OPEN:
        return NotImplemented
    below = _stack()
    types = {each.fake_type for each in (*below, mode)}
    if any(_is_subclass(tensor, types) for tensor in tensors_in((args, kwargs))):
        return NotImplemented  # the subclass has its own rule
    for each in reversed(below):
        each.take()
    modes = _Modes((*below, mode))
    try:
        keys = torch._ops._compute_keyset(args, kwargs, func.non_fallthrough_keys)  # type: ignore[no-untyped-call]
        if is_strict:
            args = tuple(modes.around(value) for value in args)
        else:
            modes.put()
        return func.dispatch(keys.remove(DispatchKey.Python).highestPriorityTypeId(), *args, **kwargs)
    finally:
        modes.take()
        for each in below:
            each.put()


def run_below(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a higher-order operator as if the dispatching mode, which torch has popped from the stack, were absent."""
    keys = torch._ops._compute_keyset(args, kwargs, func.non_fallthrough_keys)  # type: ignore[no-untyped-call]
    return func.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Lists the tensors in an operator's arguments or results, at any nesting depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def _stack() -> list[Any]:
    """Lists the modes on the stack, lowest first."""
    return [torch._C._get_dispatch_stack_at(position) for position in range(torch._C._len_torch_dispatch_stack())]


def _is_subclass(tensor: torch.Tensor, known: set[type | None]) -> bool:
    return type(tensor) not in known and torch._C._dispatch_keys(tensor).has(DispatchKey.Python)


class _Modes:
    """Restores the modes while a higher-order operator runs: once, until it returns."""

    def __init__(self, modes: tuple[Mode, ...]) -> None:
        self._modes = modes
        self._are_put = False

    def put(self) -> None:
        if not self._are_put:
            self._are_put = True
            for mode in self._modes:
                mode.put()

    def take(self) -> None:
        if self._are_put:
            for mode in reversed(self._modes):
                mode.take()

    def around(self, value: Any) -> Any:
        """Returns a function that restores the modes before running the original; other values unchanged."""
        return _Function(value, self.put) if callable(value) and not isinstance(value, _OPERATORS) else value


class _Function:
    """Wraps a function passed to a higher-order operator."""

    def __init__(self, function: Any, before: Callable[[], None]) -> None:
        self._function = function
        self._before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)
