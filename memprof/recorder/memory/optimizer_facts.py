"""Describes an optimizer: its class, its settings, the shapes of its parameters and the bytes of its state."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from memprof.recorder.memory.inventory import tensors_in
from memprof.recorder.memory.parts import bytes_of


def describe_optimizer(optimizer: Any, number: int, updates: int) -> dict[str, Any]:
    """Returns a record of the ``optimizers`` stream.

    Args:
        optimizer: The optimizer.
        number: Its index among those of the job.
        updates: Number of its updates so far.
    """
    kind = type(optimizer)
    # torch wraps `step` and names the wrapper after the original: a method of one of torch's own classes if a
    # class of the job's inherits it unchanged.
    step = kind.step
    groups = [_describe_group(group) for group in optimizer.param_groups]
    return {
        "number": number,
        "name": f"{kind.__module__}.{kind.__qualname__}",
        "algorithm": f"{step.__module__}.{step.__qualname__.rpartition('.')[0]}",
        "groups": groups,
        "state_bytes": sum(bytes_of(_own_part(tensor)) for tensor in tensors_in(list(optimizer.state.values()))),
        "scalar_bytes": torch.get_default_dtype().itemsize if torch.get_default_dtype() == torch.float64 else 4,
        "updates": updates,
    }


def _describe_group(group: dict[str, Any]) -> dict[str, Any]:
    settings = {
        name: list(value) if isinstance(value, (list, tuple)) else value
        for name, value in group.items()
        if isinstance(value, (bool, int, float, str)) or value is None or _is_numbers(value)
    }
    shapes = Counter(
        (tuple(_own_part(parameter).shape), parameter.element_size())
        for parameter in group["params"]
        # An uninitialized parameter has no known shape.
        if parameter.requires_grad and not is_lazy(parameter)
    )
    return {
        "settings": settings,
        # [sizes, bytes of an element, how many parameters]
        "parameters": [[list(shape), size, times] for (shape, size), times in shapes.items()],
    }


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a sharded tensor (DTensor); other tensors unchanged."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _is_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(part) in (int, float) for part in value)
