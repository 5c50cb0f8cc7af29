"""What a dry run says of operators that it cannot run, and raises for tensors that no machine can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException

#: No processor addresses more for one process: torch's allocators fail on any machine.
_ADDRESSED_BYTES = 2**47


def refuse_endless(tensor: FakeTensor) -> None:
    """Raises what torch's allocator raises for a tensor that no machine can hold, for jobs that catch it.

    Args:
        tensor: The tensor.

    Raises:
        RuntimeError: It is larger than the memory that a process can address; torch.OutOfMemoryError on a GPU.
    """
    size = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
    if size > _ADDRESSED_BYTES and tensor.fake_device.type == "cuda":
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB.")
    if size > _ADDRESSED_BYTES:
        raise RuntimeError(
            f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes. Error code 12 (Cannot "
            "allocate memory)"
        )


def cannot(func: Any, reason: str) -> str:
    """Returns the message for an operator that cannot be dry-run.

    Args:
        func: The operator.
        reason: Why.
    """
    return f"{func} cannot be dry-run: {reason}. Record a real run of it, or leave the operator out of the dry run."


def without_size(func: Any) -> str:
    """Returns the message for an operator whose result shape depends on values.

    Args:
        func: The operator.
    """
    reason = "its result shape depends on values"
    if func.namespace == "aten":
        return cannot(func, reason)
    name = func.name()
    return (
        f"{name} cannot be dry-run: {reason}. State its largest size, `new_dynamic_size(max=...)`, in the function "
        f'registered with @torch.library.register_fake("{name}").'
    )


def without_kernel(func: Any, error: BaseException | None) -> str:
    """Returns the message for an operator whose result shape is unknown.

    Args:
        func: The operator.
        error: What torch raised; None if its message says no more.
    """
    name = str(getattr(func, "name", lambda: func)())
    detail = (
        "" if error is None or isinstance(error, UnsupportedOperatorException) else f" ({str(error).splitlines()[0]})"
    )
    return (
        f"{name} cannot be dry-run: its result shape is unknown{detail}. "
        f'Register a function that returns tensors of that shape with @torch.library.register_fake("{name}").'
    )
