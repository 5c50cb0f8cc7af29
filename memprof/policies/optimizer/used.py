"""What a job finds, until the step, in place of values that a step or an early update changes.

What a step changes are settings of a group or attributes of the optimizer: numbers, or tensors that the step writes to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memprof.errors import PolicyError
from memprof.policies.optimizer.policy import AVERAGED, EARLY, SECOND_BACKWARD, TOGETHER, USED
from memprof.policies.runtime.replaced import WITHOUT_VALUES, has_values

Tensor = torch.Tensor
#: Functions that read no values.
_KNOWN = WITHOUT_VALUES | {Tensor.requires_grad_, Tensor.untyped_storage, Tensor.__hash__}
_ZEROING = frozenset({Tensor.zero_, torch.zero_, torch._foreach_zero_})
_CASTING = frozenset(getattr(Tensor, name) for name in ("to", "float", "double", "half", "bfloat16", "cuda", "cpu"))
#: What `Updates.single` replaces for the update of one parameter.
_REPLACED = frozenset(("params", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))


class UsedGradient(torch.Tensor):
    """Placeholder for a parameter's ``grad`` between its update inside backward and zero_grad().

    It has the gradient's shape and dtype, so checks for the presence of a gradient work as before. Zeroing drops it.
    Any other access raises a PolicyError instead of returning a wrong value.
    """

    _parameter: weakref.ref[torch.Tensor]

    @staticmethod
    def of(parameter: torch.Tensor) -> UsedGradient:
        """Returns a placeholder for a parameter."""
        made: UsedGradient = torch.Tensor._make_wrapper_subclass(
            UsedGradient, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made._parameter = weakref.ref(parameter)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Returns no inner tensors: the placeholder holds no memory."""
        return [], None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's own has arguments that mean nothing here
        """Describes the placeholder."""
        return "gradient used by step-in-backward"

    def _drop(self) -> None:
        parameter = self._parameter()
        if parameter is not None and parameter.grad is self:
            parameter.grad = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs functions that need no values.

        Raises:
            PolicyError: The function needs values.
        """
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ZEROING:
            for one in args[0] if isinstance(args[0], (list, tuple)) else (args[0],):
                if isinstance(one, cls):
                    one._drop()
                else:
                    one.zero_()
            return args[0]
        if func in _CASTING:  # the module is cast or moved, and its gradients with it
            used = args[0]
            empty = torch.empty([0] * used.dim(), dtype=used.dtype, device=used.device)
            like = func(empty, *args[1:], **kwargs)
            made = torch.Tensor._make_wrapper_subclass(cls, used.shape, dtype=like.dtype, device=like.device)
            made._parameter = used._parameter
            return made
        if func is torch._has_compatible_shallow_copy_type:  # then the module takes the cast gradient unchanged
            return False
        raise PolicyError(USED)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Rejects accesses from below the Python functions."""
        if torch._C._current_graph_task_id() == -1:
            raise PolicyError(USED)
        is_added = func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        raise PolicyError(SECOND_BACKWARD if is_added else AVERAGED)


class UsedState:
    """Placeholder for an optimizer's ``state`` between backward and the step: it is that of the next step already.

    Attributes:
        real: The state.
    """

    def __init__(self, state: Any) -> None:
        self.real = state

    @staticmethod
    def hide(optimizer: torch.optim.Optimizer) -> None:
        """Puts a placeholder in the place of an optimizer's state."""
        if not isinstance(optimizer.state, UsedState):
            optimizer.state = UsedState(optimizer.state)  # type: ignore[assignment]

    @staticmethod
    def show(optimizer: torch.optim.Optimizer) -> None:
        """Puts an optimizer's state back in its place."""
        if isinstance(optimizer.state, UsedState):
            optimizer.state = optimizer.state.real

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise PolicyError(EARLY)

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __reduce_ex__ = _refuse
    get = items = keys = values = setdefault = pop = copy = update = clear = _refuse


@dataclass(frozen=True)
class _Changes:
    """What one call of a step has changed in a dictionary: its entries, and the values of tensors in it."""

    values: dict[str, Any]
    entries: dict[str, Any]
    tensors: list[tuple[torch.Tensor, torch.Tensor]]


def _results(changes: _Changes) -> str:
    """Returns the numbers that a call has left, those in tensors included."""
    numbers = [(key, value) for key, value in changes.entries.items() if isinstance(value, (int, float))]
    return repr([*numbers, *(value.tolist() for _, value in changes.tensors if has_values(value))])


class StepSettings:
    """The changes of one step, not yet in effect."""

    def __init__(self) -> None:
        #: By the dictionary's id.
        self._changes: dict[int, _Changes] = {}

    @contextmanager
    def unchanged(self, values: dict[str, Any]) -> Iterator[None]:
        """Restores a dictionary after one update; what that has changed takes effect in ``end_round``.

        Raises:
            PolicyError: The update of another parameter in the same step has changed it to something else.
        """
        before = dict(values)
        copies = [
            (value, value._version, value.detach().clone()) for value in values.values() if type(value) is torch.Tensor
        ]
        try:
            yield
        finally:
            entries = {
                key: value
                for key, value in values.items()
                if key not in _REPLACED and (key not in before or value is not before[key])
            }
            for key in entries.keys() - before.keys():
                del values[key]
            values.update(before)
            tensors = []
            for value, version, copy in copies:
                if value._version != version:
                    tensors.append((value, value.detach().clone()))
                    value.detach().copy_(copy)
            known = self._changes.get(id(values))
            self._changes[id(values)] = _Changes(values, entries, tensors)
        if known is not None and _results(known) != _results(self._changes[id(values)]):
            raise PolicyError(TOGETHER)

    def end_round(self) -> None:
        """Applies the changes of the latest update to each dictionary."""
        for changes in self._changes.values():
            changes.values.update(changes.entries)
            for tensor, value in changes.tensors:
                tensor.detach().copy_(value)
        self._changes.clear()
