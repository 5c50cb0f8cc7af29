"""What a dry run says of operators that it cannot run, and of jobs that require CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException

#: No processor addresses more for one process: torch's allocators fail on any machine.
_ADDRESSED_BYTES = 2**47
#: torch's messages for a device missing from its build or the machine.
_MESSAGES = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "not linked with support for cuda devices",
    "No CUDA GPUs are available",
    "Attempting to deserialize object on a CUDA device",
    "Cannot access accelerator device when none is available",
)


def refuse_endless(tensor: FakeTensor) -> None:
    """Raises what torch's allocator raises for a tensor that no machine can hold, for jobs that catch it.

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
    """Returns the message for an operator that cannot be dry-run."""
    return f"{func} cannot be dry-run: {reason}. Record a real run of it, or leave the operator out of the dry run."


def without_size(func: Any) -> str:
    """Returns the message for an operator whose result shape depends on values."""
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


def require_cuda() -> None:
    """Raises torch's own error where a job places a fake tensor on CUDA and the machine has none.

    A CUDA build of torch initializes no device for fake tensors, and so would not notice.

    Raises:
        RuntimeError: There is no driver or no GPU.
        AssertionError: torch was built without CUDA.
    """
    if not torch.cuda.is_available():
        torch.cuda._lazy_init()  # type: ignore[no-untyped-call]  # torch's is not annotated


def refuse_missing_device(refuse: Callable[[str], NoReturn]) -> None:
    """Makes a job that ends for lack of CUDA explain how to simulate a device."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, (RuntimeError, AssertionError)) and any(said in str(error) for said in _MESSAGES):
            refuse(
                "the job requires CUDA, which this machine lacks: simulate a GPU of the catalogue with --dry-run "
                "--device, such as --device a100-80g."
            )
        before(kind, error, trace)

    sys.excepthook = hook
