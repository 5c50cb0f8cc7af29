"""Sequences of different lengths in a dry run: packed, padded, and in the CTC loss.

Source: aten/src/ATen/native/LossCTC.cpp, ctc_loss_allocate_outputs, and cuda/LossCTC.cu; torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.virtual.values.known import known

_aten = torch.ops.aten


def pad_packed(
    packed: torch.Tensor, batch_sizes: torch.Tensor, is_batch_first: bool, padding: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces `torch._VF._pad_packed_sequence`, running the same operators.

    Args:
        packed: The sequences, position by position.
        batch_sizes: Number of sequences at each position; with data.
        is_batch_first: Whether the result's first dimension is the batch.
        padding: Fill value.
        total_length: Length of the result; that of the longest sequence if not positive.
    """
    sizes = batch_sizes.tolist()
    padded = torch.full((max(total_length, len(sizes)), sizes[0], *packed.shape[1:]), padding, dtype=packed.dtype)
    begin = offset = 0
    for place in range(1, len(sizes) + 1):
        if place < len(sizes) and sizes[place] == sizes[begin]:
            continue
        rows = sizes[begin] * (place - begin)
        part = packed[offset : offset + rows].view(place - begin, sizes[begin], *packed.shape[1:])
        padded[begin:place, : sizes[begin]].copy_(part)
        begin, offset = place, offset + rows
    lengths = torch.tensor([sum(size > sequence for size in sizes) for sequence in range(sizes[0])])
    return padded.transpose(0, 1) if is_batch_first else padded, lengths


def _pack(padded: torch.Tensor, lengths: torch.Tensor, is_batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs sequences; if their lengths were not computed, each is taken to be the longest."""
    batch, longest = padded.shape[:2] if is_batch_first else (padded.shape[1], padded.shape[0])
    given = [longest] * batch if isinstance(lengths, FakeTensor) else lengths.tolist()
    packed = torch.empty((sum(given), *padded.shape[2:]), dtype=padded.dtype)
    return packed, torch.tensor([sum(length > place for length in given) for place in range(max(given))])


def _pack_backward(gradient: torch.Tensor, size: Any, _batch_sizes: torch.Tensor, _is_batch_first: bool) -> Any:
    return torch.empty(tuple(size), dtype=gradient.dtype)


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
#: Replacements of operators that read the data of one argument to size their results.
SIZED_BY_DATA: dict[Any, Callable[..., Any]] = {
    _aten._pack_padded_sequence.default: _pack,
    _aten._pack_padded_sequence_backward.default: _pack_backward,
    _aten._ctc_loss.default: _loss,
    _aten._ctc_loss.Tensor: _loss,
    _aten._ctc_loss_backward.default: _gradient,
    _aten._ctc_loss_backward.Tensor: _gradient,
}
