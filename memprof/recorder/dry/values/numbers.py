"""Supplies placeholders where torch reads numbers from tensors without an operator: in lists that become a tensor.

``torch.tensor([loss, 1.0])`` and ``torch.Tensor([std])`` convert each element with operators turned off
(``recursive_store`` in torch/csrc/utils/tensor_new.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memprof.recorder.dry.answers import Answers

_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "__bool__": bool,
    "__complex__": complex,
    "__float__": float,
    "__index__": int,
    "__int__": int,
}
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_PYTHON = torch._C.DispatchKey.Python


def answer_conversions(answers: Answers, mode: FakeTensorMode) -> None:
    """Lets fake tensors be converted to numbers where no dispatch mode is called.

    Args:
        answers: Supplies the placeholders.
        mode: The dry run's mode; fake tensors of other modes, such as a compiler's, are left alone.
    """
    for name, convert in _CONVERSIONS.items():
        setattr(FakeTensor, name, _converted(getattr(torch.Tensor, name), convert, answers, mode))


def _converted(original: Any, convert: Callable[[Any], Any], answers: Answers, mode: FakeTensorMode) -> Any:
    @wraps(original)
    def converted(tensor: FakeTensor) -> Any:
        is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        is_refused = tensor.numel() != 1 or (is_float and original.__name__ == "__index__")
        if is_refused or tensor.fake_mode is not mode or not _is_excluded(_PYTHON):
            return original(tensor)
        return convert(answers.value(tensor))

    return converted
