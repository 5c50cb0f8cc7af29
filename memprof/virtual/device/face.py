"""Places tensors of a dry run on a CUDA device, also those of older types, in a torch that may have no CUDA.

To Python they are on ``cuda:0``, or on the device of their rank (``ordinals``). Torch's C++ side, which needs guards
and streams from a CUDA device and a thread from its autograd engine, sees another device that needs none of these.
Python's calls are translated on the way down (`down`), and what C++ creates itself on the way up (`up`). The dispatch
keys stay CUDA's, so that autocasting and everything else based on keys behaves as on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor

from memprof.virtual.device.current import ORDINALS

#: The device that C++ sees. Of those that the autograd engine runs in the calling thread, this one is unused by jobs,
#: and composite operators choose the same fused kernels for it as for CUDA (dropout).
FACE = torch.device("lazy:0")
_NAMES = ("cuda", "lazy")
_DEVICE: Any = torch.Tensor.device
_PRIM_DEVICE = torch.ops.prim.device.default
_TYPES = {
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


def is_cuda(value: Any) -> bool:
    """Whether a value names the CUDA device, in any form that torch accepts."""
    if isinstance(value, torch.device):
        return value.type in _NAMES
    return isinstance(value, str) and value.partition(":")[0] in _NAMES


def down(value: Any) -> Any:
    """Returns the device passed to C++ in place of a value that names the CUDA device; other values unchanged.

    Raises:
        RuntimeError: It names a device that the machine does not have.
    """
    if not is_cuda(value):
        return value
    if torch.device(value).type != FACE.type:
        ORDINALS.use(value)
    return FACE


def up(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns an operator's keyword arguments with the device as Python sees it."""
    device = kwargs.get("device")
    return kwargs if device is None or device.type != FACE.type else {**kwargs, "device": ORDINALS.current()}


def is_on_device(tensor: Any) -> bool:
    """Whether a value is a fake tensor on the device, or one of torch's wrappers of it while it traces."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_device.type == "cuda"
    return isinstance(tensor, torch.Tensor) and tensor.device.type in _NAMES


def answer_device(tensor: Any) -> torch.device:
    """Returns the device that C++ sees for a fake tensor."""
    if tensor.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    return FACE if tensor.fake_device.type == "cuda" else tensor.fake_device


def answer_wrapped_device(kind: Any) -> None:
    """Has tensors of a library's class, which wrap others on the device, report the device that Python sees.

    Args:
        kind: The class, made by ``torch.Tensor._make_wrapper_subclass``.
    """
    if "device" not in vars(kind) and kind.device is _DEVICE:
        kind.device = property(lambda tensor: as_seen(_DEVICE.__get__(tensor)))


def as_seen(device: torch.device) -> torch.device:
    """Returns the device that Python sees in place of the one that C++ sees."""
    return ORDINALS.current() if device.type == FACE.type else device


def install() -> None:
    """Makes fake tensors report both devices, also outside a mode."""
    fakes: Any = fake_tensor
    # Up to torch 2.12, a fake tensor on the device would create a real one, to initialize CUDA.
    fakes.init_gpu_context = lambda *_: None
    fake: Any = FakeTensor
    mode: Any = FakeTensorMode

    def answering(original: Any) -> Any:
        """Returns a tensor's or a mode's dispatch that knows the device; ``torch.export`` has a mode of its own."""

        def dispatch(this: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _PRIM_DEVICE:
                return answer_device(args[0])
            return original(this, func, types, args, up(kwargs or {}))

        return dispatch

    fake.__torch_dispatch__ = classmethod(answering(fake.__torch_dispatch__.__func__))
    mode.__torch_dispatch__ = answering(mode.__torch_dispatch__)
    # Else both would move constants to the device while the job exports a model.
    mode.avoid_device_init = property(lambda _: True)
    proxy_tensor.CONSTANT_NUMEL_LIMIT = -1
    fake.is_cuda = property(is_on_device)
    native: Any = torch._C
    group = native._group_tensors_by_device_and_dtype

    def group_tensors(*args: Any, **kwargs: Any) -> Any:
        """Returns groups under the device that Python sees: clipping asks it for foreach kernels."""
        groups = group(*args, **kwargs)
        return {
            (ORDINALS.current() if device is not None and device.type == FACE.type else device, dtype): found
            for (device, dtype), found in groups.items()
        }

    native._group_tensors_by_device_and_dtype = group_tensors


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


def install_types() -> None:
    """Puts the types into ``torch.cuda``, and makes them the default type where a job asks for that."""
    for name, dtype in _TYPES.items():
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
        return _TYPES.get(value.removeprefix(_PREFIX))
    return None
