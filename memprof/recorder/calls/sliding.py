"""Lets a dispatch mode lie below those of the job, which enter and leave theirs as if it were not there."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: What tensors of torch's own, and of subclasses that leave operators alone, have in the place of a rule.
_NO_RULE = torch.Tensor.__torch_dispatch__
#: Whether a type of tensors leaves its operators to torch, by type.
_leaves: dict[type, bool] = {torch.Tensor: True, torch.nn.Parameter: True}


def leaves_operators(kind: type) -> bool:
    """Whether a type of tensors has no rule of its own for operators: a subclass in name, or for functions alone."""
    found = _leaves.get(kind)
    if found is None:
        found = _leaves[kind] = getattr(kind, "__torch_dispatch__", _NO_RULE) is _NO_RULE
    return found


class SlidingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is not annotated
    """A mode that is put at the bottom of the dispatch stack, and taken out from wherever it lies."""

    #: torch hands it higher-order operators, too, instead of raising that there is no rule for them.
    supports_higher_order_operators = True
    #: These are `memprof.recorder.calls.higher_order`'s.
    is_followed = True
    fake_type: type | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile compile: without this a mode makes it run eager for good."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Declines torch's own guard, which would import torch._dynamo into the job."""
        return False

    def slide_in(self) -> None:
        """Slides the mode under whatever modes are on the stack."""
        above = [mode for mode in _pop_all() if mode is not self]
        torch._C._push_on_torch_dispatch_stack(self)
        for mode in above:
            torch._C._push_on_torch_dispatch_stack(mode)

    def slide_out(self) -> None:
        """Takes the mode out of the stack, leaving all others in their order."""
        self.take()

    def put(self) -> None:
        """Puts the mode on top of the stack, for the time of one operator."""
        torch._C._push_on_torch_dispatch_stack(self)

    def take(self) -> None:
        """Ends `put`, leaving all others in their order."""
        for mode in _pop_all():
            if mode is not self:
                torch._C._push_on_torch_dispatch_stack(mode)

    def __enter__(self) -> Any:
        """Use `slide_in`: entering like any other mode would put it on top of the user's."""
        raise TypeError(f"{type(self).__name__} slides in, it is not entered")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Use `slide_out`."""
        raise TypeError(f"{type(self).__name__} slides out, it is not left")


def _pop_all() -> list[Any]:
    """Empties the stack of user modes; bottom first. Infrastructure modes (fake tensors, tracing) stay."""
    positions = range(torch._C._len_torch_dispatch_stack())
    modes = [torch._C._get_dispatch_stack_at(position) for position in positions]
    users = [mode for mode in modes if getattr(mode, "_mode_key", None) is None]
    for _ in users:
        torch._C._pop_torch_dispatch_stack(None)
    return users
