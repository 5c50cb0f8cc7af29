"""Replaces what the code that inductor generates calls: allocation, views and kernels, without memory or computation.

Inductor (torch/_inductor) writes one Python function for each graph. It allocates buffers, reuses and deletes them, and
calls fused kernels and torch's operators. Run as it is, with fake buffers and kernels that do nothing, it allocates and
frees what a real run does, in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.compiled.generated_operators import KernelAccess, kernel_access
from memprof.recorder.compiled.uncompiled import skip_compiling

#: Allocating functions of torch's C++ library, with the device of what they return.
_ALLOCATING = {
    "_empty_strided_cpu": "cpu",
    "_empty_strided_cpu_pinned": "cpu",
    "_empty_strided_cuda": "cuda",
}
_VIEW = "_reinterpret_tensor"
#: Methods of inductor's AsyncCompile that compile the source of one kernel.
_KERNELS = ("cpp", "cpp_pybinding", "triton", "multi_kernel", "size_hint_multi_kernel", "cutlass", "cuda", "halide")


class Kernel:
    """A fused kernel, which computes nothing in a dry run.

    Attributes:
        name: Its name in the generated code.
        access: Which of its arguments it writes to.
    """

    def __init__(self, access: KernelAccess, ran: Callable[[Kernel, Sequence[Any], FrameType], None]) -> None:
        """Creates a kernel without a name.

        Args:
            access: Which of its arguments it writes to.
            ran: Called with the kernel, its arguments and the calling frame, whenever the generated code runs it.
        """
        self.name = "kernel"
        self.access = access
        self._ran = ran

    def __call__(self, *arguments: Any, **_: Any) -> None:
        """Reports the run: the generated code has allocated the kernel's outputs before."""
        self._ran(self, arguments, sys._getframe(1))

    def run(self, *arguments: Any, **_: Any) -> None:
        """Reports the run of a Triton kernel."""
        self._ran(self, arguments, sys._getframe(1))


def replace_generated_calls(
    run_fake: Callable[..., torch.Tensor],
    born: Callable[[torch.Tensor, FrameType], None],
    ran: Callable[[Kernel, Sequence[Any], FrameType], None],
) -> None:
    """Replaces, for the rest of the process, the functions that generated code takes from torch when it is loaded.

    Args:
        run_fake: Runs an operator with the dry run's mode alone, unrecorded.
        born: Called with every buffer that is allocated, and the calling frame.
        ran: Called with every kernel that would run, its arguments and the calling frame.

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
            born(made, sys._getframe(1))
            return made

        skip_compiling(allocate)
        return allocate

    skip_compiling(reinterpret, Kernel.__call__, Kernel.run)
    for name, device in _ALLOCATING.items():
        if hasattr(guards, name):
            setattr(guards, name, allocating(device))
    setattr(guards, _VIEW, reinterpret)
    if hasattr(guards, "assert_alignment"):
        guards.assert_alignment = lambda *_: None  # it reads addresses
    from torch._inductor.async_compile import AsyncCompile

    compiler: Any = AsyncCompile
    for name in _KERNELS:
        if hasattr(compiler, name):
            setattr(compiler, name, lambda _, *sources, **__: Kernel(kernel_access(sources), ran))
    compiler.wait = lambda _, scope: _name_kernels(scope)


def _name_kernels(scope: dict[str, Any]) -> None:
    """Names the kernels of generated code, once it is loaded."""
    for name, value in scope.items():
        if isinstance(value, Kernel):
            value.name = name
