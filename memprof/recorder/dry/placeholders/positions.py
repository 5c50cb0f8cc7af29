"""The memory that kernels on the processor use to index with masks: the positions of elements that are true."""

from __future__ import annotations

from typing import Any

import torch

from memprof.recorder.calls.read_values import MASKS
from memprof.recorder.dry.placeholders.nonzeros import most_true

_aten = torch.ops.aten
_POSITION_BYTES = 8
_PUTS = {_aten.index_put, _aten.index_put_, _aten._index_put_impl_}
#: Elements from which a kernel uses several threads (at::internal::GRAIN_SIZE).
_GRAIN = 32_768


def position_bytes(func: Any, args: Any, result: Any) -> int:
    """Returns the peak bytes beyond its result of an operator that indexes.

    Source: ``expandTensors`` in aten/src/ATen/native/IndexingUtils.h and ``masked_select_out_impl_cpu`` in
    TensorAdvancedIndexing.cpp.

    Args:
        func: The operator.
        args: Its arguments, with data where they have it.
        result: Its result.
    """
    packet = getattr(func, "overloadpacket", None)
    if packet is _aten.index or packet in _PUTS:
        is_fill = packet in _PUTS and args[2].numel() == 1 and not any(args[3:4])
        return 0 if is_fill and _is_one_mask(args[1]) else sum(map(_of_index, args[1]))
    return _of_selection(args[0], args[1], result) if func is _aten.masked_select.default else 0


def _is_one_mask(indices: Any) -> bool:
    """Whether a number is written where a mask is true, without positions."""
    given = [index for index in indices if index is not None]
    return len(given) == 1 and given[0].dtype in MASKS


def _of_index(index: torch.Tensor | None) -> int:
    """A mask is replaced by the positions in each of its dimensions, and int32 by int64."""
    if index is None or index.device.type != "cpu":
        return 0
    if index.dtype in MASKS:
        return most_true(index) * index.dim() * _POSITION_BYTES
    return index.numel() * _POSITION_BYTES if index.dtype is torch.int32 else 0


def _of_selection(tensor: torch.Tensor, mask: torch.Tensor, result: torch.Tensor) -> int:
    """The mask is counted in int64 before there is a result; threads also need it and its running sum in int64."""
    tensor, mask = torch.broadcast_tensors(tensor, mask)  # type: ignore[no-untyped-call]
    is_serial = torch.get_num_threads() == 1 or mask.numel() < _GRAIN
    if is_serial and tensor.is_contiguous() and mask.is_contiguous():
        return max((mask.numel() + 1) * _POSITION_BYTES - result.nbytes, 0)
    return 2 * mask.numel() * _POSITION_BYTES
