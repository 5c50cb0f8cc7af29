"""CUDA kernels that allocate temporary memory before one of their results, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.device.memory import FREE, RESULTS, copied_steps, result_at

_aten = torch.ops.aten
_FP32 = 4
_INT64 = 8
#: Elements per block of a foreach kernel (aten/src/ATen/native/cuda/MultiTensorApply.cuh).
_CHUNK = 65_536
#: Gradients of an embedding of at most this many indices are added without sorting (cuda/Embedding.cu).
_UNSORTED_ROWS = 3_072
#: Gradients that a partial sum adds (NROWS_PER_THREAD, cuda/EmbeddingBackwardKernel.cu).
_PARTIAL_ROWS = 10
#: CUB aligns parts of temporary memory to these bytes, and adds as many less one.
_ALIGNMENT = 256
#: Pairs per tile of CUB's kernels on compute capability 9.0, and bytes of one bit's histograms of 256 digits.
_TILE, _HISTOGRAM = 4_608, 256 * _INT64
#: Bytes that describe a tile of a scan; each scan has 32 more than tiles.
_TILE_STATE, _MORE_TILES = 16, 32


def steps_of(func: Any, args: Any, result: Any) -> list[int] | None:
    """Returns bytes to allocate, FREE and RESULTS in the order of a kernel; None for kernels without such an order."""
    steps = _STEPS.get(getattr(func, "overloadpacket", None))
    return None if steps is None else steps(args, result)


def _layer_norm(args: Any, _result: Any) -> list[int]:
    """The input is copied if it is not contiguous (layer_norm_cuda, cuda/layer_norm_kernel.cu)."""
    return [*copied_steps(args[0]), RESULTS]


def _layer_norm_backward(args: Any, _result: Any) -> list[int]:
    """The input is copied before there are results, its result's gradient after (layer_norm_backward_cuda)."""
    return [*copied_steps(args[1]), RESULTS, *copied_steps(args[0])]


def _embedding_backward(args: Any, _result: Any) -> list[int]:
    """Indices are sorted, and the gradients of each row summed in parts, of which there may be as many as counted here.

    Source: embedding_dense_backward_cuda (cuda/Embedding.cu) and cuda/EmbeddingBackwardKernel.cu of torch 2.11; CUB's
    sizes are those of snapshots of an H200 under CUDA 13, to the byte at 4,096, 8,192, 16,384 and 262,144 indices.
    """
    gradient, indices, rows = args[0], args[1], args[2]
    count, size = indices.numel(), indices.nbytes
    copies = [*copied_steps(indices), *copied_steps(gradient)]
    if count <= _UNSORTED_ROWS:
        return [*copies, RESULTS]
    each = indices.element_size()
    segments = min(count, rows)
    partials = count // _PARTIAL_ROWS + segments
    # Where each row has many gradients, snapshots have one number per part and no sums.
    has_sums = segments * _PARTIAL_ROWS > count
    return [
        *copies,
        *(size, size, size, sort_bytes(count, each, each), FREE, FREE),
        RESULTS,
        *(size, _INT64, size, scan_bytes(count), FREE, FREE),
        *(segments * each, segments * each, scan_bytes(segments), FREE),
        *(_INT64, partials * each, partials * (gradient.shape[-1] * _FP32 if has_sums else _INT64)),
    ]


def _embedding(args: Any, _result: Any) -> list[int]:
    """Indices are copied if they are not one row after the other (embedding_symint, Embedding.cpp)."""
    indices = args[1]
    return [*([] if _is_row(indices) else [indices.numel() * indices.element_size()]), RESULTS]


def _is_row(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be viewed in one dimension."""
    kept = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return not tensor.numel() or all(
        stride == size * following for (_, stride), (size, following) in itertools.pairwise(kept)
    )


def _ctc(args: Any, _result: Any) -> list[int]:
    """Both lengths and where targets begin are copied to the device; likelihoods come last (cuda/LossCTC.cu)."""
    return [*_lengths(args[0]), result_at(1), result_at(0)]


def _ctc_backward(args: Any, _result: Any) -> list[int]:
    """The same copies, and backward variables, as many as forward ones."""
    return [*_lengths(args[1]), args[6].nbytes, RESULTS]


def _lengths(likelihoods: torch.Tensor) -> list[int]:
    return [likelihoods.shape[1] * _INT64] * 3


def _foreach_norm(args: Any, _result: Any) -> list[int]:
    """One partial norm per chunk; every tensor has as many as the largest (cuda/ForeachReduceOp.cu)."""
    tensors = args[0]
    most = max((-(-tensor.numel() // _CHUNK) for tensor in tensors), default=0)
    return [*([len(tensors) * most * _FP32] if most else []), RESULTS]


def sort_bytes(count: int, key: int, value: int) -> int:
    """Returns what CUB's radix sort of pairs takes: both copies, histograms of all bits, and counts of tiles.

    Args:
        count: Pairs.
        key: Bytes of a key.
        value: Bytes of a value.
    """
    return (key + value) * count + key * _HISTOGRAM + 1024 * -(-count // _TILE) + 2 * _ALIGNMENT - 1


def scan_bytes(count: int, tile_state: int = _TILE_STATE) -> int:
    """Returns what CUB's scan takes: a state per tile, and some.

    Args:
        count: Elements.
        tile_state: Bytes that describe a tile.
    """
    return aligned(states_bytes(count, _TILE, tile_state)) + _ALIGNMENT


def states_bytes(count: int, tile: int, tile_state: int = _TILE_STATE) -> int:
    """Returns what describes the tiles of a CUB kernel.

    Args:
        count: Elements.
        tile: Elements per tile.
        tile_state: Bytes that describe a tile.
    """
    return (_MORE_TILES + -(-count // tile)) * tile_state


def aligned(size: int) -> int:
    """Returns CUB's temporary memory of one part: it is aligned, and as many bytes less one are added."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT - 1


_STEPS: dict[Any, Callable[[Any, Any], list[int]]] = {
    _aten.native_layer_norm: _layer_norm,
    _aten.native_layer_norm_backward: _layer_norm_backward,
    _aten.embedding: _embedding,
    _aten.embedding_dense_backward: _embedding_backward,
    _aten._ctc_loss: _ctc,
    _aten._ctc_loss_backward: _ctc_backward,
    _aten._foreach_norm: _foreach_norm,
}
