"""Launches of Triton kernels, as libraries of fused losses and norms write them: on a simulated device they do nothing.

A kernel reads and writes tensors that exist; whatever it allocates, its caller allocates before it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def install() -> None:
    """Replaces what compiles and launches a kernel, which asks the driver of a real GPU; nothing without Triton."""
    if importlib.util.find_spec("triton") is None:
        return
    for module, name in (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")):
        getattr(importlib.import_module(module), name).run = _run


def _run(_kernel: Any, *_args: Any, **_options: Any) -> None:
    """Launches nothing."""
