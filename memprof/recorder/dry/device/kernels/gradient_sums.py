"""Sums of gradients, which autograd computes in place where nobody else holds one of them.

A tensor with several uses has a gradient from each; autograd adds them up as they arrive
(``InputBuffer::accumulate``, torch/csrc/autograd/input_buffer.cpp). It adds into the sum so far if it holds the last
reference to it and to its storage, which a view shares with its base. Fake tensors are a subclass, for which it always
allocates the sum.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from memprof.recorder.steps.usages import dense_layout

_ADD = torch.ops.aten.add.Tensor
_ENGINE = torch.autograd.graph.__file__
_FRAMES = ("memprof", "torch")
#: Where torch's optimizers are; they may run inside backward.
_OPTIMIZERS = "torch.optim."
#: References of a tensor: of C++, to its storage, and of Python.
_Counts = tuple[int, int, int]


class GradientSums:
    """Finds the gradient whose memory a sum of gradients takes over."""

    def __init__(self) -> None:
        """Starts without having seen a sum."""
        # References that the call itself holds, by the depth of modes it passes: the fewest seen so far.
        self._least: dict[int, _Counts] = {}

    def reused(self, func: Any, args: Any, result: Any) -> torch.Tensor | None:
        """Returns the gradient whose memory holds the sum; None if the sum has memory of its own.

        Args:
            func: An operator.
            args: Its arguments.
            result: Its result.
        """
        if func is not _ADD or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return None
        depth = _depth()
        first: torch.Tensor = args[0]
        second: torch.Tensor = args[1]
        if depth < 0 or first is second or not all(_is_plain(value, result) for value in (first, second)):
            return None
        counts = [
            (
                value._use_count(),  # type: ignore[attr-defined]  # not in torch's stubs
                torch._C._storage_Use_Count(value.untyped_storage()._cdata),
                sys.getrefcount(value),
            )
            for value in (first, second)
        ]
        seen = [*counts, self._least[depth]] if depth in self._least else counts
        least = self._least[depth] = tuple(min(column) for column in zip(*seen, strict=True))
        return first if counts[0] == least and dense_layout(first) is not None else None


def _is_plain(value: Any, result: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.dtype is result.dtype
        and value.shape == result.shape
        and hasattr(value, "_use_count")
    )


def _depth() -> int:
    """Returns how many modes the engine's call has passed; -1 if Python code of the job or an optimizer made it."""
    depth, frame = 0, sys._getframe(2)
    while frame is not None:
        code, name = frame.f_code, str(frame.f_globals.get("__name__", ""))
        if code.co_name == "_engine_run_backward" and code.co_filename == _ENGINE:
            return depth
        if code.co_name == "__torch_dispatch__":
            depth += 1
        elif name.partition(".")[0] not in _FRAMES or name.startswith(_OPTIMIZERS):
            return -1
        frame = frame.f_back  # type: ignore[assignment]
    return -1
