"""Temporary memory of CUDA kernels beyond their results, from the sources of torch and its libraries.

Sizes that a library chooses at run time (cuDNN's workspaces) are estimates, and marked as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.machines import outside
from memprof.machines.card import LT_WORKSPACE_BYTES, Architecture
from memprof.recorder.calls.torch_state import packets
from memprof.trace.operator_facts import CUBLAS_PRODUCTS, FOURIER_TRANSFORMS
from memprof.units import format_bytes
from memprof.virtual.cudnn.answers import Answers
from memprof.virtual.device.current import CURRENT
from memprof.virtual.device.kernels.attention import safe_softmax_sizes
from memprof.virtual.device.kernels.convolved import Convolutions
from memprof.virtual.device.kernels.formats import low_bit_steps
from memprof.virtual.device.kernels.indexing import Indexing, median_sizes, sort_sizes, topk_sizes
from memprof.virtual.device.kernels.recurrent import dropout_state_bytes, gates_bytes, turned_bytes
from memprof.virtual.device.kernels.reductions import copied_bytes, is_reduction, reduction_sizes
from memprof.virtual.device.kernels.steps import scan_bytes, steps_of
from memprof.virtual.device.memory import VirtualMemory

_aten = torch.ops.aten
_FP32 = 4
_INT64 = 8
_HALF = (torch.float16, torch.bfloat16)
#: Since this version torch gives Blackwell a larger workspace, and cuBLASLt that of cuBLAS in place of one of its own
#: (pytorch pull requests 175344, 168175 and 175879). Before, since 2.9, cuBLASLt keeps 1 MiB for each handle and stream
#: (pull request 156495; getCUDABlasLtWorkspaceSize, cuda/CublasHandlePool.cpp of 2.9 to 2.11).
_LARGER = (2, 12)
#: A block of 64 x 64 gradients of queries, and its lock and counter (GradQTempStorage, kernel_backward.h).
_QUERY_BLOCK = 64 * 64 * _FP32 + 16
#: Bytes that describe a tile of a scan of numbers of up to 4 bytes, and of larger ones.
_SMALL_STATE, _LARGE_STATE = 8, 16
#: cuDNN aligns the parts of a workspace to these bytes.
_CUDNN_ALIGNMENT = 256
_PRODUCTS = packets(CUBLAS_PRODUCTS)
#: cuBLASLt alone has products of scaled matrices.
_SCALED = {_aten._scaled_mm}


class DeviceKernels:
    """Allocates the temporary memory of kernels from the device's memory."""

    def __init__(
        self, architecture: Architecture, memory: VirtualMemory, multiprocessors: int, answers: Answers | None = None
    ) -> None:
        """Starts with no kernel run.

        Args:
            architecture: Torch's behaviour on the device.
            memory: The device's memory.
            multiprocessors: Number of the device's multiprocessors.
            answers: cuDNN's workspaces; None where they are estimated.
        """
        self._answers = answers
        self._convolutions = Convolutions(answers, has_tf32=architecture.has_bf16_attention)
        self._architecture = architecture
        self._memory = memory
        self._handles: set[tuple[bool, int]] = set()
        version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        is_unified = version >= _LARGER
        self._workspace_bytes = (
            architecture.cublas_workspace_bytes if is_unified else architecture.older_workspace_bytes
        )
        self._lt_workspace_bytes = 0 if is_unified else LT_WORKSPACE_BYTES
        self._lt_handles: set[tuple[bool, int]] = set()
        self._multiprocessors = multiprocessors
        self._indexing = Indexing(multiprocessors, architecture.threads)
        self._has_dropout_state = False
        self._estimated: set[str] = set()

    def run(self, func: Any, args: Any, result: Any, kwargs: Any = None) -> None:
        """Allocates and frees an operator's temporary memory; keeps a library's workspace."""
        packet = getattr(func, "overloadpacket", None)
        if packet in _PRODUCTS or packet in _SCALED:
            # Each thread's handle keeps a workspace for each stream: one of forward, one of backward.
            handle = (torch._C._current_graph_task_id() != -1, CURRENT.stream[0] if CURRENT.stream else 0)
            if handle not in self._handles:
                self._handles.add(handle)
                self._memory.keep(self._workspace_bytes)
            if self._lt_workspace_bytes and handle not in self._lt_handles and _is_of_cublaslt(packet, args, result):
                self._lt_handles.add(handle)
                self._memory.keep(self._lt_workspace_bytes)
            return
        if is_reduction(packet):
            threads = self._architecture.threads
            parts = reduction_sizes(packet, args, result, self._multiprocessors, threads)
            self._memory.pass_through([copied_bytes(packet, args, result), *parts])
            return
        if packet is _aten._cudnn_rnn and not self._has_dropout_state:
            state_bytes = dropout_state_bytes(args, self._multiprocessors)
            self._has_dropout_state = bool(state_bytes)
            if state_bytes:
                self._memory.keep(state_bytes)
        sizes = _TEMPORARIES.get(packet) or _TEMPORARIES.get(func)
        if sizes is not None:
            if func is _aten.sort.stable:
                args = (args[0], (kwargs or {}).get("dim", -1))
            self._memory.pass_through(sizes(args, result))
            if packet in _ESTIMATED:
                self._estimated.add(str(packet))

    def steps(self, func: Any, args: Any, result: Any) -> list[int] | None:
        """Returns what a kernel allocates and frees around its results; None if nothing comes before one of them."""
        steps = (
            self._indexing.steps_of(func, args, result)
            or self._convolutions.steps_of(func, args, result)
            or steps_of(func, args, result)
            or low_bit_steps(func, args, result)
        )
        packet = getattr(func, "overloadpacket", None)
        if steps is not None and packet in _ESTIMATED:
            self._estimated.add(str(packet))
        return steps

    def notes(self) -> list[str]:
        """Returns notes on which sizes are estimates."""
        if not self._estimated:
            return []
        notes, estimated = [], set(self._estimated)
        convolutions = estimated.intersection(map(str, _CONVOLUTIONS))
        if not self._convolutions.use_cudnn:
            estimated -= convolutions
            convolutions = set()
        if convolutions and self._answers is not None and self._answers.name:
            notes.append(self._answers.note())
            estimated -= convolutions
        if estimated:
            names = ", ".join(sorted(estimated))
            notes.append(f"workspaces that a library chooses at run time are estimates: those of {names}")
        if convolutions & estimated:
            notes.append(
                "cuDNN chooses the workspace of a convolution: from none to "
                f"{format_bytes(outside.MOST_CONVOLUTION_BYTES)}, and in backward the weight's bytes besides "
                f"({outside.CONVOLUTIONS_SOURCE}); {self._way_to_ask()}"
            )
        if not estimated.isdisjoint(map(str, _TRANSFORMS)):
            notes.append(
                "cuFFT chooses the work area of a Fourier transform: one to eight times its complex elements, of which "
                f"one is counted ({outside.TRANSFORMS_SOURCE})"
            )
        return notes

    def _way_to_ask(self) -> str:
        if self._answers is not None and self._answers.problem:
            return f"it could not be asked: {self._answers.problem}"
        return "with pip install 'torch-memprof[cudnn]' it is asked, without a GPU"


def _is_of_cublaslt(packet: Any, args: Any, result: Any) -> bool:
    """Whether cuBLASLt multiplies, and adds the bias (isInputCompliesAddmmCudaLt, cuda/Blas.cpp of torch 2.11)."""
    if packet in _SCALED:
        return True
    if packet not in (_aten.addmm, _aten._addmm_activation):
        return False
    bias, left, right = args[:3]
    is_row = bias.is_contiguous() and bias.squeeze().dim() == 1 and bias.shape[-1] == right.shape[1]
    return bool(is_row and result.is_contiguous() and min(*left.shape, *right.shape) > 1)


def _padded(count: int, step: int) -> int:
    return -(-count // step) * step


def _flash_backward(args: Any, _result: Any) -> list[int]:
    """Gradients of queries, accumulated in fp32, in rows of 128 and heads of 32 (flash_attn/flash_api.cpp, mha_bwd)."""
    query = args[1]
    return _query_sums(args, _padded(query.shape[2], 128), _padded(query.shape[3], 32))


def _query_sums(args: Any, rows: int, wide: int) -> list[int]:
    """Products of gradients and results, gradients of queries in fp32, and of keys and values by head of queries."""
    query, key = args[1], args[2]
    batch, heads, _, width = query.shape
    sizes = [batch * heads * rows * _FP32, batch * heads * rows * wide * _FP32]
    if key.shape[1] != heads:
        sizes += [batch * heads * key.shape[2] * width * query.element_size()] * 2
    return sizes


def _cudnn_forward(_args: Any, _result: Any) -> list[int]:
    """The least block of a workspace, in which snapshots of an H200 under cuDNN 9.19 have nothing else."""
    return [_CUDNN_ALIGNMENT]


def _cudnn_backward(args: Any, _result: Any) -> list[int]:
    return [cudnn_backward_bytes(args[1], args[2])]


def cudnn_backward_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """The same sums as of the flash kernel, but not padded, in one workspace: as in snapshots of an H200.

    Args:
        query: Of shape (batch, heads, length, width).
        key: The same.
    """
    return sum(_query_sums((None, query, key), *query.shape[2:])) + _CUDNN_ALIGNMENT


def _efficient_backward(args: Any, _result: Any) -> list[int]:
    """Gradient-result products and gradients of queries being summed (kernel_backward.h, cuda/attention_backward.cu).

    For half types the kernel computes the former; for fp32 they are multiplied, summed and laid out before.
    """
    query, out = args[1], args[5]
    batch, heads, length, width = query.shape
    sums = batch * heads * length * _FP32
    if query.dtype in _HALF:
        return [sums, batch * heads * _padded(length, 64) * _padded(width, 64) * _FP32]
    return [out.numel() * _FP32, sums, sums, batch * heads * -(-length // 64) * -(-width // 64) * _QUERY_BLOCK]


def _group_norm(args: Any, _result: Any) -> list[int]:
    """Factors per sample and channel (cuda/group_norm_kernel.cu)."""
    tensor = args[0]
    return [tensor.shape[0] * tensor.shape[1] * _FP32] * 2


def _group_norm_backward(args: Any, _result: Any) -> list[int]:
    return [size for size in _group_norm([args[1]], None) for _ in range(2)]


def _recurrent(args: Any, _result: Any) -> list[int]:
    return [turned_bytes(args), gates_bytes(args)]


def _softmax_backward(args: Any, _result: Any) -> list[int]:
    """Products of gradients and results (softmax_backward_cuda_out, cuda/SoftMax.cu)."""
    return [args[0].numel() * torch.promote_types(args[0].dtype, args[1].dtype).itemsize]


def _scan(args: Any, result: Any) -> list[int]:
    """CUB scans tensors of one dimension (scan_dim, cuda/ScanUtils.cuh)."""
    copied = copied_bytes(_aten.cumsum, args, result)
    if result.dim() != 1 or not result.numel():
        return [copied]
    return [copied, scan_bytes(result.numel(), _LARGE_STATE if result.element_size() > _FP32 else _SMALL_STATE)]


def _fourier(args: Any, result: Any) -> list[int]:
    """Returns a work area: once the elements of the complex side, the least that cuFFT documents (SpectralOps.cpp)."""
    transformed = result if result.is_complex() else args[0]
    return [transformed.nbytes * outside.LEAST_TIMES]


def _inverse_real(args: Any, result: Any) -> list[int]:
    """Returns the same and a copy of the input, which cuFFT overwrites."""
    return [args[0].nbytes, *_fourier(args, result)]


_TEMPORARIES: dict[Any, Callable[[Any, Any], list[int]]] = {
    _aten._safe_softmax: safe_softmax_sizes,
    _aten._scaled_dot_product_cudnn_attention: _cudnn_forward,
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _cudnn_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    _aten.native_group_norm: _group_norm,
    _aten.native_group_norm_backward: _group_norm_backward,
    _aten._cudnn_rnn: _recurrent,
    _aten.sort: sort_sizes,
    _aten.topk: topk_sizes,
    _aten.median.default: median_sizes,
    _aten.nanmedian.default: median_sizes,
    _aten._softmax_backward_data: _softmax_backward,
    _aten.cumsum: _scan,
    _aten.cumprod: _scan,
    _aten._fft_c2c: _fourier,
    _aten._fft_r2c: _fourier,
    _aten._fft_c2r: _inverse_real,
}
_CONVOLUTIONS, _TRANSFORMS = packets("convolution convolution_backward"), packets(FOURIER_TRANSFORMS)
_ESTIMATED = {*_CONVOLUTIONS, *_TRANSFORMS, _aten._cudnn_rnn}
