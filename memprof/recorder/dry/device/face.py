"""Lets tensors of a dry run be on a CUDA device in a torch that may have none.

To Python they are on ``cuda:0``. To torch's C++ side, which asks a CUDA device for guards and streams, and its
autograd engine for a thread, they have another face: a device that needs none of these. Python's calls are
translated on their way down (`Face.down`), and what C++ makes for itself on its way up (`Face.up`). The dispatch keys
stay CUDA's, so that autocasting and whatever goes by keys does as on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

#: The device that C++ sees: of those its autograd engine runs in the calling thread, the one that jobs do not use, and
#: for which composite operators choose the fused kernels that they choose for CUDA, too (dropout).
FACE = torch.device("lazy:0")
CUDA = torch.device("cuda:0")
_NAMES = ("cuda", "lazy")
_PRIM_DEVICE = torch.ops.prim.device.default


class WrongDeviceError(RuntimeError):
    """The job asks for a device beyond the one there is; said as CUDA says it."""


def is_cuda(value: Any) -> bool:
    """Whether a value names the CUDA device, in any way that torch takes."""
    if isinstance(value, torch.device):
        return value.type in _NAMES
    return isinstance(value, str) and value.partition(":")[0] in _NAMES


def down(value: Any) -> Any:
    """Returns the device that C++ is told in place of a value that names the CUDA device; other values as they are.

    Raises:
        WrongDeviceError: It is a second one.
    """
    if not is_cuda(value):
        return value
    index = torch.device(value).index
    if index:
        raise WrongDeviceError("CUDA error: invalid device ordinal")
    return FACE


def up(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns an operator's keyword arguments with the device that Python knows."""
    device = kwargs.get("device")
    return kwargs if device is None or device.type != FACE.type else {**kwargs, "device": CUDA}


def is_on_device(tensor: Any) -> bool:
    """Whether a tensor is one of the dry run's on the device."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


def answer_device(tensor: Any) -> torch.device:
    """Answers C++ where a tensor without memory is."""
    if tensor.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    return FACE if tensor.fake_device.type == "cuda" else tensor.fake_device


def install() -> None:
    """Gives tensors without memory their face; outside a mode, too."""
    fake: Any = FakeTensor
    dispatch = fake.__torch_dispatch__.__func__

    def answer(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _PRIM_DEVICE:
            return answer_device(args[0])
        return dispatch(cls, func, types, args, up(kwargs or {}))

    fake.__torch_dispatch__ = classmethod(answer)
    fake.is_cuda = property(is_on_device)
    data: Any = torch.Tensor.data

    def give(tensor: Any, other: Any) -> None:
        data.__set__(tensor, other)
        tensor.fake_device = other.fake_device  # which torch notes beside the data

    fake.data = property(data.__get__, give)
