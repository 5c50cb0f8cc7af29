"""Recurrent layers as cuDNN runs them: all layers in one call, and the reserve saved for backward.

cuDNN does not document its reserve (`cudnnGetRNNTempSpaceSizes` requires a device): these sizes count what the
formulas of backward need, each step's gates, cell and output, and are estimates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.dry.device.face import FACE, is_on_device

_aten = torch.ops.aten
#: cuDNN's mode, and saved values per step in units of the hidden size, by layer type (cudnn.h, cudnnRNNMode_t).
_MODES: dict[Any, tuple[int, int]] = {
    torch.rnn_relu: (0, 2),
    torch.rnn_tanh: (1, 2),
    torch.lstm: (2, 6),
    torch.gru: (3, 5),
}
_LSTM = 2
_KEPT = dict(_MODES.values())
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


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
    weights: Any,
    _stride: int,
    _buffer: Any,
    hidden: Any,
    cell: Any,
    mode: int,
    width: int,
    projected: int,
    layers: int,
    is_batch_first: bool,
    _dropout: float,
    train: bool,
    is_bidirectional: bool,
    batch_sizes: Any,
    _dropout_state: Any,
) -> Any:
    directions = 2 if is_bidirectional else 1
    places = data.shape[0] if batch_sizes else data.shape[0] * data.shape[1]
    out = (*data.shape[:-1], (projected or width) * directions)
    kept = places * width * directions * layers * _KEPT[mode] * data.element_size() if train else 0
    return (
        data.new_empty(out),
        torch.empty_like(hidden),
        torch.empty_like(cell) if cell is not None else data.new_empty((0,)),
        torch.empty((kept,), dtype=torch.uint8, device=FACE),
        data.new_empty((sum(weight.numel() for weight in weights),)),
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


def gates_bytes(args: Any) -> int:
    """Returns the bytes that cuDNN needs at once for the gates of a layer, for each step.

    Args:
        args: Arguments of ``_cudnn_rnn``.
    """
    data, mode, width, is_bidirectional, batch_sizes = args[0], args[6], args[7], args[13], args[14]
    places = data.shape[0] if batch_sizes else data.shape[0] * data.shape[1]
    size: int = places * width * _GATES[mode] * (2 if is_bidirectional else 1) * data.element_size()
    return size
