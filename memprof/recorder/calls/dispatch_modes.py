"""Keeps a dispatch mode below those of the job, and gives it numbers as the tensors that they were."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memprof.recorder.calls.untraced import untraced

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
    #: Handled by `memprof.recorder.calls.higher_order`.
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
    """Returns an operator's arguments with tensors where its schema has them; None if no number was passed there.

    Args:
        func: The operator.
        args: Its positional arguments, which it rejected.
    """
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
