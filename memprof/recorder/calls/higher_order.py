"""Lets higher-order operators (cond, scan, flex_attention ...) through a dispatch mode, and shows it what they run.

torch sends a higher-order operator to the modes of the stack one by one. What is left is a function in Python, which
runs ordinary operators with no mode on the stack. Here the modes are put back for it, so that they see those like any
others. Some of these functions insist on an empty stack: for them the modes come back with the first function that
was given to the operator, and stay until it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator

#: torch's own whose function runs under any stack.
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
#: Those that insist on an empty one; so do all that derive from torch's BaseHOP.
_STRICT = frozenset({"cond", "invoke_subgraph", "scan", "strict_mode"})
_BASE_RULE = "_call_CompositeExplicitAutograd"
_OPERATORS = (torch._ops.OperatorBase, torch._ops.OpOverloadPacket, torch.Tensor)


class Mode(Protocol):
    """One of our dispatch modes, which can be put on the stack and taken from it while operators run.

    Attributes:
        is_followed: True, which marks a mode as ours.
        fake_type: Type of the tensors without memory that it runs operators on; None where there is none.
    """

    is_followed: bool
    fake_type: type | None

    def put(self) -> None:
        """Puts the mode on the stack."""

    def take(self) -> None:
        """Takes the mode from wherever it lies on the stack."""


def is_higher_order(func: Any) -> bool:
    """Whether an operator is one that runs functions, and not on tensors alone."""
    return isinstance(func, HigherOrderOperator)


def is_traced() -> bool:
    """Whether a mode that is not ours is left on the stack: torch's own, which traces operators."""
    return not all(getattr(mode, "is_followed", False) for mode in _stack())


def follow(mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a higher-order operator with all our modes in force for the operators inside.

    Args:
        mode: The mode whose turn it is, which torch has taken from the stack; all that are left there are ours.
        func: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        What the operator returns; NotImplemented, with nothing run, where it cannot be followed.
    """
    is_strict = func._name in _STRICT or hasattr(func, _BASE_RULE)
    if not is_strict and func._name not in _OPEN:
        return NotImplemented
    below = _stack()
    types = {each.fake_type for each in (*below, mode)}
    if any(_is_subclass(tensor, types) for tensor in tensors_in((args, kwargs))):
        return NotImplemented  # the subclass has a rule of its own
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
    """Runs a higher-order operator as if the mode whose turn it is, which torch has taken from the stack, were not."""
    keys = torch._ops._compute_keyset(args, kwargs, func.non_fallthrough_keys)  # type: ignore[no-untyped-call]
    return func.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Lists the tensors in an operator's arguments or results, however nested."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def _stack() -> list[Any]:
    """Lists the modes on the stack, the lowest first."""
    return [torch._C._get_dispatch_stack_at(position) for position in range(torch._C._len_torch_dispatch_stack())]


def _is_subclass(tensor: torch.Tensor, known: set[type | None]) -> bool:
    return type(tensor) not in known and torch._C._dispatch_keys(tensor).has(DispatchKey.Python)


class _Modes:
    """Puts modes back while a higher-order operator runs: once, and until it returns."""

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
        """Returns a function that puts the modes back before it goes on; other values as they are."""
        return _Function(value, self.put) if callable(value) and not isinstance(value, _OPERATORS) else value


class _Function:
    """Stands for a function that a higher-order operator is given."""

    def __init__(self, function: Any, before: Callable[[], None]) -> None:
        self._function = function
        self._before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)
