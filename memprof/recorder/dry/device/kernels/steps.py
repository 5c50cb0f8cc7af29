"""CUDA kernels that allocate temporary memory before one of their results, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.dry.device.kernels.convolved import convolution_backward_steps
from memprof.recorder.dry.device.memory import FREE, RESULTS

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
    """Returns bytes to allocate, FREE and RESULTS in the order of a kernel; None for kernels without such an order.

    Args:
        func: The operator.
        args: Its arguments.
        result: Its result.
    """
    steps = _STEPS.get(getattr(func, "overloadpacket", None))
    return None if steps is None else steps(args, result)


def _layer_norm(args: Any, _result: Any) -> list[int]:
    """The input is copied if it is not contiguous (layer_norm_cuda, cuda/layer_norm_kernel.cu)."""
    return [*_copied(args[0]), RESULTS]


def _layer_norm_backward(args: Any, _result: Any) -> list[int]:
    return [*_copied(args[1]), RESULTS]


def _embedding_backward(args: Any, _result: Any) -> list[int]:
    """Indices are sorted, and the gradients of each row summed in parts, of which there may be as many as counted here.

    Source: embedding_dense_backward_cuda (cuda/Embedding.cu) and cuda/EmbeddingBackwardKernel.cu of torch 2.11; CUB's
    sizes are those of snapshots of an H200 under CUDA 13, to the byte at 4,096, 8,192, 16,384 and 262,144 indices.
    """
    gradient, indices, rows = args[0], args[1], args[2]
    count, size = indices.numel(), indices.nbytes
    if count <= _UNSORTED_ROWS:
        return [*_copied(gradient), RESULTS]
    each = indices.element_size()
    segments = min(count, rows)
    partials = count // _PARTIAL_ROWS + segments
    # Where each row has many gradients, snapshots have one number per part and no sums.
    has_sums = segments * _PARTIAL_ROWS > count
    return [
        *_copied(gradient),
        *(size, size, size, _sort_bytes(size, count), FREE, FREE),
        RESULTS,
        *(size, _INT64, size, _scan_bytes(count), FREE, FREE),
        *(segments * each, segments * each, _scan_bytes(segments), FREE),
        *(_INT64, partials * each, partials * (gradient.shape[-1] * _FP32 if has_sums else _INT64)),
    ]


def _foreach_norm(args: Any, _result: Any) -> list[int]:
    """One partial norm per chunk; every tensor has as many as the largest (cuda/ForeachReduceOp.cu)."""
    tensors = args[0]
    most = max((-(-tensor.numel() // _CHUNK) for tensor in tensors), default=0)
    return [*([len(tensors) * most * _FP32] if most else []), RESULTS]


def _sort_bytes(size: int, count: int) -> int:
    """Returns what CUB's radix sort of pairs takes: both copies, histograms of all 64 bits, and counts of tiles."""
    return 2 * size + 8 * _HISTOGRAM + 1024 * -(-count // _TILE) + 2 * _ALIGNMENT - 1


def _scan_bytes(count: int) -> int:
    states = (_MORE_TILES + -(-count // _TILE)) * _TILE_STATE
    return -(-states // _ALIGNMENT) * _ALIGNMENT + 2 * _ALIGNMENT - 1


def _copied(tensor: torch.Tensor) -> list[int]:
    return [] if tensor.is_contiguous() else [tensor.numel() * tensor.element_size()]


_STEPS: dict[Any, Callable[[Any, Any], list[int]]] = {
    _aten.native_layer_norm: _layer_norm,
    _aten.native_layer_norm_backward: _layer_norm_backward,
    _aten.embedding_dense_backward: _embedding_backward,
    _aten._foreach_norm: _foreach_norm,
    _aten.convolution_backward: convolution_backward_steps,
}
