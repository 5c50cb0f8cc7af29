"""Recurrent layers as cuDNN runs them: all layers in one call, and the reserve saved for backward.

cuDNN does not document its reserve (`cudnnGetRNNTempSpaceSizes` requires a device): these sizes count what the
formulas of backward need, and are estimates. An LSTM's is four gates and a cell for each step and layer, the output of
each layer that dropout follows, and 256 bytes: as much as cuDNN 9.19 took on an H200, in float32 and in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.virtual.device.face import FACE, is_on_device

_aten = torch.ops.aten
#: cuDNN's mode, and saved values per step in units of the hidden size, by layer type (cudnn.h, cudnnRNNMode_t).
_MODES: dict[Any, tuple[int, int]] = {
    torch.rnn_relu: (0, 2),
    torch.rnn_tanh: (1, 2),
    torch.lstm: (2, 5),
    torch.gru: (3, 5),
}
_LSTM = 2
_KEPT = dict(_MODES.values())
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
_RESERVE_BYTES = 256


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """Replaces `torch.lstm` and the like."""
    if kwargs or not is_on_device(args[0]):
        return NotImplemented
    mode = _MODES[func][0]
    is_packed = isinstance(args[1], torch.Tensor) and isinstance(args[3], (list, tuple))
    if is_packed:
        data, batch_sizes, state, weights, _biases, layers, dropout, train, is_bidirectional = args
        is_batch_first, sizes = False, batch_sizes.tolist()
    else:
        data, state, weights, _biases, layers, dropout, train, is_bidirectional, is_batch_first = args
        sizes = []
    hidden: Any = state[0] if mode == _LSTM else state
    cell: Any = state[1] if mode == _LSTM else None
    projected = hidden.shape[-1] if cell is not None and hidden.shape[-1] != cell.shape[-1] else 0
    width = cell.shape[-1] if cell is not None else hidden.shape[-1]
    options = (mode, width, projected, layers, is_batch_first, dropout, train, is_bidirectional, sizes, None)
    stride = len(weights) // (layers * (2 if is_bidirectional else 1))
    found = _aten._cudnn_rnn.default(data, list(weights), stride, None, hidden, cell, *options)
    return found[:3] if mode == _LSTM else found[:2]


#: Replacement of each function.
RECURRENT: dict[Any, Callable[..., Any]] = dict.fromkeys(_MODES, _call)


def _forward(
    data: Any,
    _weights: Any,
    _stride: int,
    _buffer: Any,
    hidden: Any,
    cell: Any,
    mode: int,
    width: int,
    projected: int,
    layers: int,
    is_batch_first: bool,
    dropout: float,
    train: bool,
    is_bidirectional: bool,
    batch_sizes: Any,
    _dropout_state: Any,
) -> Any:
    directions = 2 if is_bidirectional else 1
    places = data.shape[0] if batch_sizes else data.shape[0] * data.shape[1]
    out = (*data.shape[:-1], (projected or width) * directions)
    values = layers * _KEPT[mode] + (layers - 1 if dropout else 0)
    kept = places * width * directions * values * data.element_size() + _RESERVE_BYTES if train else 0
    # cuDNN's layout has steps first (aten/src/ATen/native/cudnn/RNN.cpp).
    is_turned = is_batch_first and not batch_sizes
    return (
        data.new_empty((out[1], out[0], *out[2:])).transpose(0, 1) if is_turned else data.new_empty(out),
        torch.empty_like(hidden),
        torch.empty_like(cell) if cell is not None else data.new_empty((0,)),
        torch.empty((kept,), dtype=torch.uint8, device=FACE),
        data.new_empty((0,)),  # a real layer's weights are parts of one buffer, which is returned as it is
    )


def _backward(data: Any, weights: Any, _stride: int, _buffer: Any, hidden: Any, cell: Any, *_rest: Any) -> Any:
    return (
        torch.empty_like(data),
        torch.empty_like(hidden),
        torch.empty_like(cell) if cell is not None else None,
        [torch.empty_like(weight) for weight in weights],
    )


#: Shapes of the results of cuDNN's operators; torch has only those of forward, without the reserve.
SHAPES: dict[Any, Callable[..., Any]] = {
    _aten._cudnn_rnn.default: _forward,
    _aten._cudnn_rnn_backward.default: _backward,
}


def dropout_state_bytes(args: Any, multiprocessors: int) -> int:
    """Returns the bytes of the random states that the first layer with dropout allocates for good; 0 without dropout.

    They are 24 for each of 2,048 threads of a multiprocessor (`cudnnDropoutGetStatesSize`): 6,488,064 on an H200.

    Args:
        args: Arguments of ``_cudnn_rnn``.
        multiprocessors: Number of the device's multiprocessors.
    """
    dropout, is_training = args[11], args[12]
    return multiprocessors * 2048 * 24 if dropout and is_training else 0


def turned_bytes(args: Any) -> int:
    """Returns the bytes of the copy of a layer's input with steps first; 0 where it has that layout already.

    Args:
        args: Arguments of ``_cudnn_rnn``.
    """
    data, is_batch_first, batch_sizes = args[0], args[10], args[14]
    if not is_batch_first or batch_sizes or data.transpose(0, 1).is_contiguous():
        return 0
    size: int = data.numel() * data.element_size()
    return size


def gates_bytes(args: Any) -> int:
    """Returns the bytes that cuDNN needs at once for the gates of a layer, for each step.

    Args:
        args: Arguments of ``_cudnn_rnn``.
    """
    data, mode, width, is_bidirectional, batch_sizes = args[0], args[6], args[7], args[13], args[14]
    places = data.shape[0] if batch_sizes else data.shape[0] * data.shape[1]
    size: int = places * width * _GATES[mode] * (2 if is_bidirectional else 1) * data.element_size()
    return size
