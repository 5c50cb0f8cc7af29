"""Shapes of the connectionist temporal classification loss, whose table is as wide as the longest target.

Source: aten/src/ATen/native/LossCTC.cpp, ctc_loss_allocate_outputs, and cuda/LossCTC.cu; torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.dry.values.known import known

_aten = torch.ops.aten


def ctc_shape(func: Any) -> Callable[..., Any] | None:
    """Returns the shape function of an operator of the loss; None for others."""
    return _SHAPES.get(func)


def ctc_temporary_bytes(func: Any, args: Any) -> int:
    """Returns what the kernel of an operator of the loss takes in addition to its result: the backward variables."""
    return int(args[6].nbytes) if func in _BACKWARD else 0


def _loss(log_probs: Any, targets: Any, _input_lengths: Any, target_lengths: Any, *_: Any, **__: Any) -> Any:
    """Returns a loss per sequence, and the forward variables: sequences x times x (2 longest target + 1)."""
    times, batch = log_probs.shape[:2]
    width = 2 * _longest(targets, target_lengths, batch) + 1
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, times, width))


def _longest(targets: Any, lengths: Any, batch: int) -> int:
    """Returns the longest target; where lengths were not computed, rows are full, and targets in a row equally long."""
    if targets.dim() > 1:
        return _longest_of(lengths, targets.shape[1])
    return _longest_of(lengths, -(-targets.numel() // max(batch, 1)))


def _longest_of(lengths: Any, otherwise: int) -> int:
    values = known(lengths) if isinstance(lengths, FakeTensor) else lengths
    if values is None:
        return otherwise
    return max(values.flatten().tolist() if isinstance(values, torch.Tensor) else values, default=0)


def _gradient(_gradient: Any, log_probs: Any, *_: Any, **__: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


_BACKWARD = {_aten._ctc_loss_backward.default, _aten._ctc_loss_backward.Tensor}
_SHAPES: dict[Any, Callable[..., Any]] = {
    _aten._ctc_loss.default: _loss,
    _aten._ctc_loss.Tensor: _loss,
    _aten._ctc_loss_backward.default: _gradient,
    _aten._ctc_loss_backward.Tensor: _gradient,
}
