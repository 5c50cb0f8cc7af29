"""Operators with a kernel of their own on CUDA, which a build of torch without CUDA takes apart instead.

Autograd keeps what the parts need where it would keep what the kernel needs. Source: the dispatch of these operators in
aten/src/ATen/native/native_functions.yaml; torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

_KEY = "CUDA"
_FUSED = ("_fused_rms_norm", "silu_backward", "mish_backward")


class FusedKernels:
    """Tells torch's dispatcher that CUDA has these kernels, so that it goes by their formulas."""

    def install(self) -> None:
        """Tells it, for good."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._library = library  # what was told goes with it
        for name in _FUSED:
            known = hasattr(torch.ops.aten, name)
            if known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _KEY):
                library.impl(name, _never, _KEY)


def _never(*_args: Any, **_kwargs: Any) -> Any:
    """Stands for the kernel: operators are answered by their shapes, and none is run."""
    raise NotImplementedError("A kernel was to be run on a device that is not there: this is a fault of memprof.")
