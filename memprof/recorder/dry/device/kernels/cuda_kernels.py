"""Temporary memory of CUDA kernels beyond their results, from the sources of torch and its libraries.

Sizes that a library chooses at run time (cuDNN's workspaces) are estimates, and marked as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.machines import convolutions, fourier
from memprof.machines.architectures import Architecture
from memprof.recorder.dry.device.current import CURRENT
from memprof.recorder.dry.device.kernels.fourier import fourier_sizes, inverse_real_sizes
from memprof.recorder.dry.device.kernels.int8 import int8_sizes
from memprof.recorder.dry.device.kernels.recurrent import gates_bytes
from memprof.recorder.dry.device.kernels.reductions import is_reduction, reduction_sizes
from memprof.recorder.dry.device.memory import VirtualMemory
from memprof.units import format_bytes

_aten = torch.ops.aten
_FP32 = 4
_INT64 = 8
_HALF = (torch.float16, torch.bfloat16)
#: Since this version torch shares cuBLAS's workspace with cuBLASLt (TORCH_CUBLASLT_UNIFIED_WORKSPACE).
_UNIFIED = (2, 8)
#: Since this version torch gives Blackwell a larger workspace.
_LARGER = (2, 12)
#: Pairs that cub sorts in one tile, and pairs per tile where it takes several.
_TILE, _PART = 2_304, 1_920
#: Elements per block of a foreach kernel (aten/src/ATen/native/cuda/MultiTensorApply.cuh).
_CHUNK = 65_536
#: Gradients of an embedding of at most this many indices are added without sorting (cuda/Embedding.cu).
_UNSORTED_ROWS = 3_072
#: cuDNN pads channels to as many bytes for tensor cores: 8 of half types, 4 of TF32 (since 7.6.3; NVIDIA's guide to
#: convolutional layers, "Channels in and out").
_CHANNEL_BYTES = 16
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._addmm_activation, _aten.dot, _aten.mv, _aten.addmv}


class DeviceKernels:
    """Allocates the temporary memory of kernels from the device's memory."""

    def __init__(self, architecture: Architecture, memory: VirtualMemory, multiprocessors: int) -> None:
        """Starts with no kernel run.

        Args:
            architecture: Torch's behaviour on the device.
            memory: The device's memory.
            multiprocessors: Number of the device's multiprocessors.
        """
        self._architecture = architecture
        self._memory = memory
        self._handles: set[tuple[bool, int]] = set()
        version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        self._is_unified = version >= _UNIFIED
        self._workspace_bytes = (
            architecture.cublas_workspace_bytes if version >= _LARGER else architecture.older_workspace_bytes
        )
        self._multiprocessors = multiprocessors
        self._estimated: set[str] = set()

    def run(self, func: Any, args: Any, result: Any) -> None:
        """Allocates and frees an operator's temporary memory; keeps a library's workspace."""
        packet = getattr(func, "overloadpacket", None)
        if packet in _PRODUCTS:
            self._use_cublas(packet, args)
            return
        if is_reduction(packet):
            threads = self._architecture.threads
            self._memory.pass_through(reduction_sizes(packet, args, result, self._multiprocessors, threads))
            return
        sizes = _TEMPORARIES.get(packet) or int8_sizes(func)
        if sizes is not None:
            self._memory.pass_through(sizes(args, result))
            if packet in _ESTIMATED:
                self._estimated.add(str(packet))

    def notes(self) -> list[str]:
        """Returns notes on which sizes are estimates."""
        if not self._estimated:
            return []
        names = ", ".join(sorted(self._estimated))
        notes = [f"workspaces that a library chooses at run time are estimates: those of {names}"]
        if not self._estimated.isdisjoint(map(str, _CONVOLUTIONS)):
            notes.append(
                "cuDNN chooses the workspace of a convolution: from none to "
                f"{format_bytes(convolutions.MOST_BYTES)}, and in backward the weight's bytes besides "
                f"({convolutions.SOURCE})"
            )
        if not self._estimated.isdisjoint(map(str, _TRANSFORMS)):
            notes.append(
                "cuFFT chooses the work area of a Fourier transform: one to eight times its complex elements, of which "
                f"one is counted ({fourier.SOURCE})"
            )
        return notes

    def _use_cublas(self, packet: Any, args: Any) -> None:
        """Allocates cuBLAS workspaces: each thread's handle keeps one for each stream (one forward, one backward)."""
        handle = (torch._C._current_graph_task_id() != -1, CURRENT.stream[0] if CURRENT.stream else 0)
        if handle not in self._handles:
            self._handles.add(handle)
            self._memory.keep(self._workspace_bytes)
        if packet is _aten.addmm and not self._is_unified and args[0].dim() == 1:
            self._memory.pass_through([self._architecture.lt_workspace_bytes])


def _padded(count: int, step: int) -> int:
    return -(-count // step) * step


def _flash_backward(args: Any, _result: Any) -> list[int]:
    """Gradients of queries, accumulated in fp32, in rows of 128 and heads of 32 (flash_attn/flash_api.cpp, mha_bwd)."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows, wide = _padded(length, 128), _padded(width, 32)
    sizes = [batch * heads * rows * _FP32, batch * heads * rows * wide * _FP32]
    if key.shape[1] != heads:
        sizes += [batch * heads * key.shape[2] * width * query.element_size()] * 2
    return sizes


def _efficient_backward(args: Any, _result: Any) -> list[int]:
    """Gradient-result products and, for half types, fp32 gradients of queries (kernel_backward.h)."""
    query = args[1]
    batch, heads, length, width = query.shape
    sizes = [batch * heads * length * _FP32]
    if query.dtype in _HALF:
        sizes.append(batch * heads * _padded(length, 64) * _padded(width, 64) * _FP32)
    return sizes


def _embedding_backward(args: Any, result: Any) -> list[int]:
    """Rows are sorted and summed in parts of ten (cuda/EmbeddingBackwardKernel.cu); ids are assumed to be random."""
    gradient, indices, rows = args[0], args[1], args[2]
    count = indices.numel()
    if count <= _UNSORTED_ROWS:
        return []
    met = rows * (1 - (1 - 1 / rows) ** count) if rows > 1 else 1
    parts = int(max(met, count / 10))
    return [4 * count * indices.element_size(), 2 * parts * _INT64, parts * gradient.shape[-1] * _FP32]


def _index_put(args: Any, _result: Any) -> list[int]:
    """Indices are numbered, sorted and kept in both orders if values are accumulated (cuda/Indexing.cu)."""
    is_added = len(args) > 3 and bool(args[3])
    if not is_added:
        return []
    count = max((index.numel() for index in args[1] if index is not None), default=0)
    places = 1
    for size, index in zip(args[0].shape, args[1], strict=False):
        places *= size if index is not None else 1
    return [*[_INT64 * count] * 5, _sort_pairs(count, places)]


def _sort_pairs(count: int, largest: int) -> int:
    """Returns the bytes in which cub sorts pairs of 8 bytes: of more than one tile, a second copy and histograms.

    The sizes of tiles follow from snapshots of an RTX 4090 (8,192 pairs take 138,752 bytes, few take one block).
    """
    if count <= _TILE:
        return 1
    passes = -(-max(largest - 1, 1).bit_length() // 8)
    tables = 1024 * passes + 1024 * -(-count // _PART) + 511
    return 2 * _INT64 * count + tables


def _group_norm(args: Any, _result: Any) -> list[int]:
    """Factors per sample and channel (cuda/group_norm_kernel.cu)."""
    tensor = args[0]
    return [tensor.shape[0] * tensor.shape[1] * _FP32] * 2


def _group_norm_backward(args: Any, _result: Any) -> list[int]:
    return [size for size in _group_norm([args[1]], None) for _ in range(2)]


def _foreach_norm(args: Any, _result: Any) -> list[int]:
    """One partial norm per chunk; every tensor has as many as the largest (cuda/ForeachReduceOp.cu)."""
    tensors = args[0]
    most = max((-(-tensor.numel() // _CHUNK) for tensor in tensors), default=0)
    return [len(tensors) * most * _FP32]


def _convolution(args: Any, result: Any) -> list[int]:
    """Tensor cores need channels last: cuDNN copies other layouts to its workspace, and the result back."""
    tensor, weight = args[0], args[1]
    return [_rearranged([tensor, weight, result])]


def _convolution_backward(args: Any, _result: Any) -> list[int]:
    gradient, tensor, weight = args[0], args[1], args[2]
    return [_rearranged([gradient, tensor, weight])]


def _rearranged(tensors: list[Any]) -> int:
    first = tensors[0]
    if first.dtype not in (*_HALF, torch.float32) or first.dim() != 4:
        return 0
    if first.is_contiguous(memory_format=torch.channels_last) and not first.is_contiguous():
        return 0
    together = _CHANNEL_BYTES // first.element_size()
    return sum(
        tensor.nbytes // tensor.shape[1] * _padded(tensor.shape[1], together) if tensor.shape[1] else 0
        for tensor in tensors
    )


def _recurrent(args: Any, _result: Any) -> list[int]:
    return [gates_bytes(args)]


def _ctc_backward(args: Any, _result: Any) -> list[int]:
    """Backward variables, as many as forward ones (cuda/LossCTC.cu)."""
    return [args[6].nbytes]


def _sort(args: Any, _result: Any) -> list[int]:
    tensor = args[0]
    return [tensor.nbytes, tensor.numel() * _INT64]


_TEMPORARIES: dict[Any, Callable[[Any, Any], list[int]]] = {
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    _aten.embedding_dense_backward: _embedding_backward,
    _aten.index_put_: _index_put,
    _aten.index_put: _index_put,
    _aten._index_put_impl_: _index_put,
    _aten.native_group_norm: _group_norm,
    _aten.native_group_norm_backward: _group_norm_backward,
    _aten._foreach_norm: _foreach_norm,
    _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution_backward,
    _aten._cudnn_rnn: _recurrent,
    _aten._ctc_loss_backward: _ctc_backward,
    _aten.sort: _sort,
    _aten._fft_c2c: fourier_sizes,
    _aten._fft_r2c: fourier_sizes,
    _aten._fft_c2r: inverse_real_sizes,
}
_CONVOLUTIONS = {_aten.convolution, _aten.convolution_backward}
_TRANSFORMS = {_aten._fft_c2c, _aten._fft_r2c, _aten._fft_c2r}
_ESTIMATED = {*_CONVOLUTIONS, *_TRANSFORMS, _aten._cudnn_rnn, _aten.embedding_dense_backward}
