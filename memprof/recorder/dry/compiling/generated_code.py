"""Replaces what the code that inductor generates calls: allocation, views and kernels, without memory or computation.

Inductor (https://docs.pytorch.org/docs/stable/torch.compiler.html) writes one Python function for each graph. It allocates
buffers, reuses and deletes them, and calls fused kernels and torch's operators. Run as it is, with fake buffers and
kernels that do nothing, it allocates and frees what a real run does, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.calls.uncompiled import skip_compiling

#: Allocating functions of torch's C++ library, with the device of what they return.
_ALLOCATING = {
    "_empty_strided_cpu": "cpu",
    "_empty_strided_cpu_pinned": "cpu",
    "_empty_strided_cuda": "cuda",
}
_VIEW = "_reinterpret_tensor"
#: Methods of inductor's AsyncCompile that compile the source of one kernel.
_KERNELS = ("cpp", "cpp_pybinding", "triton", "multi_kernel", "size_hint_multi_kernel", "cutlass", "cuda", "halide")


class _NoKernel:
    """A kernel that computes nothing."""

    def __call__(self, *arguments: Any, **settings: Any) -> None:
        """Does nothing: the code allocated the kernel's outputs before."""

    run = __call__


def replace_generated_calls(run_fake: Callable[..., torch.Tensor], born: Callable[[torch.Tensor], None]) -> None:
    """Replaces, for the rest of the process, the functions that generated code takes from torch when it is loaded.

    Args:
        run_fake: Runs an operator with the dry run's mode alone, unrecorded.
        born: Called with every buffer that is allocated.

    Raises:
        AttributeError: This torch's generated code calls other functions.
    """
    guards: Any = torch._C._dynamo.guards
    view_of_data = getattr(guards, _VIEW)

    def reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            real: torch.Tensor = view_of_data(tensor, size, stride, offset)
            return real
        return run_fake(torch.as_strided, tensor, size, stride, tensor.storage_offset() + offset)

    def allocating(device: str) -> Callable[..., torch.Tensor]:
        def allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
            made = run_fake(torch.empty_strided, size, stride, dtype=dtype, device=device)
            born(made)
            return made

        skip_compiling(allocate)
        return allocate

    skip_compiling(reinterpret, _NoKernel.__call__)
    for name, device in _ALLOCATING.items():
        if hasattr(guards, name):
            setattr(guards, name, allocating(device))
    setattr(guards, _VIEW, reinterpret)
    if hasattr(guards, "assert_alignment"):
        guards.assert_alignment = _NoKernel()  # it reads addresses
    from torch._inductor.async_compile import AsyncCompile

    compiler: Any = AsyncCompile
    kernel = _NoKernel()
    for name in _KERNELS:
        if hasattr(compiler, name):
            setattr(compiler, name, lambda *_, **__: kernel)
    compiler.wait = lambda *_: None
