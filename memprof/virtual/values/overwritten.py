"""Tensors with data into which a dry run wrote values that it did not compute: they are no longer data.

The job holds the tensor itself, so a fake tensor is kept with its storage and takes its place in later operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.trace.operator_facts import FILLS_ZEROS, ZEROS, is_among

#: Attribute of a storage: the fake tensor in its place.
_STAND_IN = "_memprof_stand_in"


def stand_in(tensor: torch.Tensor) -> FakeTensor | None:
    """Returns what stands for the whole memory of a tensor with data that was written to without values; else None."""
    if not is_integral(tensor) or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return None
    found: FakeTensor | None = getattr(tensor.untyped_storage(), _STAND_IN, None)
    return found


def note_overwritten(func: Any, args: Any, kwargs: Any, lent: Any, lent_by_name: Any) -> None:
    """Notes that an operator wrote values to tensors with data that a dry run does not compute."""
    for tensor, fake in zip(written(func, args, kwargs), written(func, lent, lent_by_name), strict=True):
        if type(tensor) is not torch.Tensor or not is_integral(tensor) or not tensor.numel():
            continue
        if stand_in(tensor) is None and isinstance(fake, FakeTensor):
            storage = tensor.untyped_storage()
            count = storage.nbytes() // tensor.element_size()
            is_all = tensor.is_contiguous() and tensor.numel() == count
            with torch.no_grad():
                whole = fake.reshape(count) if is_all else fake.new_empty(count)
            setattr(storage, _STAND_IN, whole)


def written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yields the arguments that an operator changes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


def is_integral(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of integers or booleans, whose values sizes may depend on."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


#: Makes the stand-in for an argument with data, such as an index of the processor: between the zeros and their filling.
_LENDING = torch.ops.aten.empty_strided.default


class InPlace:
    """Tracks the zeros that an operator of backward created last."""

    def __init__(self) -> None:
        """Starts with no zeros seen."""
        self._zeros: weakref.ref[torch.Tensor] | None = None

    def result(self, func: Any, args: Any, result: Any) -> Any:
        """Returns an operator's result: the zeros passed to it, if they are backward's own and fresh."""
        if func is _LENDING:
            return result
        zeros, self._zeros = self._zeros, None
        if torch._C._current_graph_task_id() == -1:
            return result
        known = zeros() if zeros is not None else None
        name = str(func)
        if known is not None and is_among(name, FILLS_ZEROS) and known is args[0] and known.shape == result.shape:
            return known
        if is_among(name, ZEROS) and isinstance(result, torch.Tensor):
            self._zeros = weakref.ref(result)
        return result
