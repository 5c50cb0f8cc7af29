"""Converts numbers back to tensors that torch unwrapped on the way to a dispatch mode.

A number used by a traced or scripted function is a tensor on torch's C++ side. Modes receive it as a Python
number, which most operators do not accept back: torch itself then fails under any mode.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.recorder.calls.untraced import untraced

_TYPES: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


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
