"""Packs and pads sequences in a dry run; torch's own code reads their lengths without an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten


def sized_by_data(func: Any) -> Callable[..., Any] | None:
    """Returns the replacement of an operator that reads the data of one argument to size its result.

    Args:
        func: The operator.

    Returns:
        A function of the operator's arguments; None if the operator is not of that kind.
    """
    return _SIZED.get(func)


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


_SIZED: dict[Any, Callable[..., Any]] = {
    _aten._pack_padded_sequence.default: _pack,
    _aten._pack_padded_sequence_backward.default: _pack_backward,
}
