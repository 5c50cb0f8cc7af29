"""Operators with a CUDA kernel of their own, which a build of torch without CUDA decomposes instead.

Autograd then saves the tensors that the parts need instead of those the kernel needs. Source: the dispatch of these
operators in aten/src/ATen/native/native_functions.yaml; torch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

_KEY = "CUDA"
_FUSED = ("_fused_rms_norm", "silu_backward", "mish_backward")


class FusedKernels:
    """Registers these kernels for CUDA with torch's dispatcher, so that it uses their derivative formulas."""

    def install(self) -> None:
        """Registers them, for good."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._library = library  # the registrations end with it
        for name in _FUSED:
            known = hasattr(torch.ops.aten, name)
            if known and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _KEY):
                library.impl(name, _never, _KEY)


def _never(*_args: Any, **_kwargs: Any) -> Any:
    """Placeholder for the kernel: operators return shapes, and no kernel runs."""
    raise NotImplementedError("Internal error in memprof: kernel run on a virtual device.")
