"""Explains how to dry-run a job that requires CUDA on a machine without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

#: torch's messages for a device missing from its build or the machine.
_MESSAGES = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "not linked with support for cuda devices",
    "No CUDA GPUs are available",
    "Attempting to deserialize object on a CUDA device",
    "Cannot access accelerator device when none is available",
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
    """Makes a job that ends for lack of CUDA explain how to simulate a device.

    Args:
        refuse: Ends the job with a message.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, (RuntimeError, AssertionError)) and any(said in str(error) for said in _MESSAGES):
            refuse(
                "the job requires CUDA, which this machine lacks: simulate a GPU of the catalogue with --dry-run "
                "--device, such as --device a100-80g."
            )
        before(kind, error, trace)

    sys.excepthook = hook
