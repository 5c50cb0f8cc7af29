"""Types of tensors in older jobs, such as ``torch.cuda.FloatTensor``: torch refuses them in a build without CUDA."""

from __future__ import annotations

from typing import Any

import torch

from memprof.recorder.dry.device.face import is_on_device

_NAMES = {
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}
_PREFIX = "torch.cuda."


class _TensorType(type):
    """A type of tensors, which makes tensors instead of objects of its own."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and is_on_device(value) and value.dtype is cls.dtype

    def __call__(cls, *args: Any, device: Any = None) -> Any:
        """Returns a tensor of a size, of given values, or empty."""
        del device  # there is only one
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            value = args[0]
            is_tensor = isinstance(value, torch.Tensor)
            return value.to("cuda", cls.dtype) if is_tensor else torch.tensor(value, dtype=cls.dtype, device="cuda")
        size = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(size, dtype=cls.dtype, device="cuda")


def install() -> None:
    """Puts the types into ``torch.cuda``, and makes them the default type where a job asks for that."""
    for name, dtype in _NAMES.items():
        made = _TensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
        setattr(torch.cuda, name, made)
    torch_module: Any = torch
    before = torch.set_default_tensor_type

    def set_default_tensor_type(t: Any, /) -> None:
        dtype = dtype_named(t)
        if dtype is None:
            before(t)
        else:
            torch.set_default_dtype(dtype)
            torch.set_default_device("cuda")

    torch_module.set_default_tensor_type = set_default_tensor_type


def dtype_named(value: Any) -> torch.dtype | None:
    """Returns the dtype of a type of tensors on the device, given as the type or by its name; None for others."""
    if isinstance(value, _TensorType):
        return value.dtype
    if isinstance(value, str) and value.startswith(_PREFIX):
        return _NAMES.get(value.removeprefix(_PREFIX))
    return None
