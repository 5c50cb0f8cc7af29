"""Packs and pads sequences in a dry run, whose lengths are data that torch's own code reads past its operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten


def sized_by_data(func: Any) -> Callable[..., Any] | None:
    """Returns what stands in for an operator that reads the data of one argument for the sizes of its result.

    Args:
        func: The operator.

    Returns:
        Takes the operator's arguments; None where the operator is not of that kind.
    """
    return _SIZED.get(func)


def pad_packed(
    packed: torch.Tensor, batch_sizes: torch.Tensor, is_batch_first: bool, padding: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for `torch._VF._pad_packed_sequence`, with the operators that it runs.

    Args:
        packed: The sequences, place by place.
        batch_sizes: How many sequences have each place; with data.
        is_batch_first: Whether sequences come before places in the result.
        padding: What fills the rest.
        total_length: Places in the result; as many as the longest has where it is not positive.
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
    """Packs sequences; where nobody computed their lengths, each is the longest."""
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
