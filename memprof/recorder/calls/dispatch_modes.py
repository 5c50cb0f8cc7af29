"""Keeps a dispatch mode below those of the job, and passes numbers and higher-order operators through it.

A number used by a traced or scripted function is a tensor on torch's C++ side. Modes receive it as a Python
number, which most operators do not accept back: torch itself then fails under any mode.

torch dispatches a higher-order operator to the modes of the stack one by one. The remainder is a Python function
that runs ordinary operators with no mode on the stack. Here the modes are restored for it, so that they see those
operators like any others. Some of these functions require an empty stack: for them the modes are restored when the
first function passed to the operator is called, and stay until it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from memprof.recorder.calls.torch_state import untraced

#: `__torch_dispatch__` of torch's own tensors and of subclasses without a dispatch rule.
_NO_RULE = torch.Tensor.__torch_dispatch__
#: Whether a tensor type leaves its operators to torch, by type.
_leaves: dict[type, bool] = {torch.Tensor: True, torch.nn.Parameter: True}
_TYPES: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
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


def leaves_operators(kind: type) -> bool:
    """Whether a tensor type has no dispatch rule of its own: a subclass in name only, or for functions only."""
    found = _leaves.get(kind)
    if found is None:
        found = _leaves[kind] = getattr(kind, "__torch_dispatch__", _NO_RULE) is _NO_RULE
    return found


def let_operators_through(kind: type) -> None:
    """Declares a tensor type without a dispatch rule of its own, beside that of fake tensors."""
    _leaves[kind] = True


class SlidingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is not annotated
    """A mode inserted at the bottom of the dispatch stack, and removed from wherever it is."""

    #: torch passes it higher-order operators too, instead of raising that they have no rule.
    supports_higher_order_operators = True
    #: Marks the mode as memprof's.
    is_followed = True
    fake_type: type | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile compile: otherwise the mode forces eager execution permanently."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Disables torch's own guard, which would import torch._dynamo into the job."""
        return False

    def slide_in(self) -> None:
        """Inserts the mode below all modes on the stack."""
        above = [mode for mode in _pop_all() if mode is not self]
        torch._C._push_on_torch_dispatch_stack(self)
        for mode in above:
            torch._C._push_on_torch_dispatch_stack(mode)

    def slide_out(self) -> None:
        """Removes the mode from the stack, keeping the order of the others."""
        self.take()

    def put(self) -> None:
        """Pushes the mode on top of the stack for the duration of one operator."""
        torch._C._push_on_torch_dispatch_stack(self)

    def take(self) -> None:
        """Ends `put`, keeping the order of the others."""
        for mode in _pop_all():
            if mode is not self:
                torch._C._push_on_torch_dispatch_stack(mode)

    def __enter__(self) -> Any:
        """Unsupported; use `slide_in`: entering like any other mode would put it on top of the user's."""
        raise TypeError(f"{type(self).__name__} cannot be entered: use slide_in()")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unsupported; use `slide_out`."""
        raise TypeError(f"{type(self).__name__} cannot be exited: use slide_out()")


def _pop_all() -> list[Any]:
    """Empties the stack of user modes; bottom first. Infrastructure modes (fake tensors, tracing) stay."""
    positions = range(torch._C._len_torch_dispatch_stack())
    modes = [torch._C._get_dispatch_stack_at(position) for position in positions]
    users = [mode for mode in modes if getattr(mode, "_mode_key", None) is None]
    for _ in users:
        torch._C._pop_torch_dispatch_stack(None)
    return users


def with_tensors(func: Any, args: Any) -> tuple[Any, ...] | None:
    """Returns an operator's arguments with tensors where its schema has them; None if no number was passed there."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None
    places = [
        position
        for position, (value, wanted) in enumerate(zip(args, schema.arguments, strict=False))
        if type(value) in _TYPES and str(wanted.type) == "Tensor"
    ]
    if not places:
        return None
    made = list(args)
    with untraced(), torch._C._DisableTorchDispatch():
        for place in places:
            made[place] = torch.scalar_tensor(args[place], dtype=_TYPES[type(args[place])], device="cpu")
    return tuple(made)


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


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Returns arguments with a function applied to each tensor in them, at any nesting depth."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: map_tensors(change, item) for name, item in value.items()}
    return type(value)(map_tensors(change, item) for item in value) if type(value) in (list, tuple) else value


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
