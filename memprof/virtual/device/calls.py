"""Translates the job's calls of torch whose result depends on the device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memprof.machines.card import Architecture
from memprof.virtual.device.face import FACE, answer_wrapped_device, down, dtype_named, is_cuda, is_on_device
from memprof.virtual.device.kernels.attention import Attention
from memprof.virtual.device.kernels.recurrent import RECURRENT
from memprof.virtual.device.pinned import PinnedMemory

_Tensor: Any = torch.Tensor
_devices: Any = importlib.import_module("torch.utils._device")
#: Attention, which torch also calls inside its own functions, where the mode is off.
ATTENTION: tuple[tuple[Any, str], ...] = (
    (torch.nn.functional, "scaled_dot_product_attention"),
    (torch._C._nn, "scaled_dot_product_attention"),
)
#: Functions that take a device and create no tensor.
_OF_NAMES = {torch.device, torch.set_default_device, torch.get_default_device}
#: Where these take a device by position; a bare number there is an index of the accelerator's devices.
_PLACES = {
    torch.device: 0,
    torch.set_default_device: 0,
    torch._C._nn._parse_to: 0,
    _Tensor.to: 1,
}
#: Elements of a list of indices that torch reads as a tuple (treatSequenceAsTuple, python_variable_indexing.cpp).
_OF_TUPLES = (_Tensor, slice, type(None), type(Ellipsis), list, tuple)
#: torch creates these on the processor and moves them without an operator.
_FILLED = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)

#: Places of the device, and of further dispatch keys, among the arguments of ``Tensor._make_wrapper_subclass``.
_WRAPPED_DEVICE, _EXTRA_KEYS = 7, 13
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

_NUMBERS = (bool, int, float, complex)


class DeviceCalls(TorchFunctionMode):
    """The lowest function mode of a dry run on a device: it sees calls as torch would receive them."""

    def __init__(
        self, architecture: Architecture, dry: Any, before_backward: Callable[[], None], pinned: PinnedMemory
    ) -> None:
        """Prepares the translation.

        Args:
            architecture: Torch's behaviour on the device.
            dry: The mode in which operators are dry-run.
            before_backward: Called before each backward.
            pinned: Follows what is pinned.
        """
        super().__init__()
        self._dry = dry
        self._before_backward = before_backward
        self._pinned = pinned
        attend = Attention(architecture)
        self._replaced: dict[Any, Callable[..., Any]] = {
            _Tensor.cuda: _to_device,
            _Tensor.type: self._type,
            _Tensor.new_tensor: _new_tensor,
            _Tensor.__getitem__: _get,
            _Tensor.__setitem__: _set,
            torch.nn.functional.scaled_dot_product_attention: attend,
            torch._C._nn.scaled_dot_product_attention: attend,
            **dict.fromkeys((torch.nn.functional.ctc_loss, torch.ctc_loss), _ctc),
            **dict.fromkeys(_FILLED, _filled),
            torch.sparse_coo_tensor: _coo,
            **RECURRENT,
        }

    def install(self) -> None:
        """Intercepts every call from now on, including those inside torch's own functions and inside backward."""
        self.__enter__()  # type: ignore[no-untyped-call]  # torch's is not annotated
        autograd: Any = torch.autograd
        run = autograd._engine_run_backward

        @wraps(run)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self._before_backward()
            with self:  # a function mode is off inside the calls it handles, and `Tensor.backward` is one
                return run(*args, **kwargs)

        autograd._engine_run_backward = autograd.graph._engine_run_backward = run_backward
        make = _Tensor._make_wrapper_subclass

        def make_wrapper(*args: Any, **kwargs: Any) -> Any:
            is_placed = is_cuda(args[_WRAPPED_DEVICE] if len(args) > _WRAPPED_DEVICE else kwargs.get("device"))
            if len(args) > _EXTRA_KEYS and is_placed:  # functional tensors of torch's tracing, and jagged ones
                args = (*args[:_EXTRA_KEYS], args[_EXTRA_KEYS] | _AUTOCAST, *args[_EXTRA_KEYS + 1 :])
            if is_placed:
                answer_wrapped_device(args[0])
            return make(*map(down, args), **{name: down(value) for name, value in kwargs.items()})

        _Tensor._make_wrapper_subclass = staticmethod(make_wrapper)  # not visible to function modes
        # A data loader pins its batches in a thread of its own, where no mode is on.
        _Tensor.pin_memory, _Tensor.is_pinned = self._pin, self._is_pinned
        _Tensor.record_stream = _nothing  # torch's own refuses streams of a dry run before any mode sees the call
        for owner, name in ATTENTION:
            original = getattr(owner, name, None)
            if original is not None:
                setattr(owner, name, self._standing_in(original))

    @property
    def _pin(self) -> Callable[..., Any]:
        def pin_memory(tensor: Any, device: Any = None) -> Any:
            """Returns a tensor as it is, noted as pinned: a copy in the processor's memory would be the same."""
            self._pinned.pin(tensor)
            return tensor

        return pin_memory

    @property
    def _is_pinned(self) -> Callable[..., bool]:
        def is_pinned(tensor: Any, device: Any = None) -> bool:
            return self._pinned.is_pinned(tensor)

        return is_pinned

    def _standing_in(self, original: Any) -> Any:
        answer = self._replaced[original]

        @wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            found = answer(original, args, kwargs)
            return original(*args, **kwargs) if found is NotImplemented else found

        return stand_in

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handles one call."""
        args, kwargs = _with_names(func, args, _with_default(func, kwargs or {}))
        if func in _FILLED and kwargs.pop("pin_memory", False):  # torch's own needs a device
            return self._pin(self.__torch_function__(func, types, args, kwargs))
        replaced = self._replaced.get(func)
        if replaced is not None:
            answer = replaced(func, args, kwargs)
            if answer is not NotImplemented:
                return answer
        names_device = func not in _OF_NAMES and (is_cuda(kwargs.get("device")) or any(map(is_cuda, args)))
        if names_device:
            kwargs = {name: down(value) for name, value in kwargs.items()}
            args = tuple(down(value) for value in args)
        elif torch.compiler.is_compiling() or not any(map(is_on_device, args)):
            return func(*args, **kwargs)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)
        with self._dry:  # in a data loader, where everything else runs for real; vmap makes tensors with no arguments
            return func(*args, **kwargs)

    def _type(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the type name of a tensor on the device, as CUDA does; or moves a tensor to a type there."""
        wanted = dtype_named(args[1] if len(args) > 1 else kwargs.get("dtype"))
        if wanted is not None:
            return args[0].to(FACE, wanted)
        if len(args) > 1 or kwargs or not is_on_device(args[0]):
            return NotImplemented
        return func(args[0]).replace(FACE.type, "cuda")


def _with_default(func: Any, kwargs: Any) -> Any:
    """Returns a call's keyword arguments with the default device, which torch adds below all other function modes."""
    default = _devices.CURRENT_DEVICE
    if not is_cuda(default) or kwargs.get("device") is not None:
        return kwargs
    return {**kwargs, "device": default} if func in _devices._device_constructors() else kwargs


def _with_names(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns a call's arguments with a device given by its number as ``cuda:N``; torch's CPU build refuses numbers."""
    if type(kwargs.get("device")) is int:
        kwargs = {**kwargs, "device": f"cuda:{kwargs['device']}"}
    place = _PLACES.get(func)
    if place is not None and len(args) > place and type(args[place]) is int:
        args = (*args[:place], f"cuda:{args[place]}", *args[place + 1 :])
    return args, kwargs


def _to_device(_func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    device = rest[0] if rest else kwargs.get("device", "cuda")
    if device is None:
        device = "cuda"
    elif isinstance(device, int):
        device = torch.device("cuda", device)
    options = {name: value for name, value in kwargs.items() if name != "device"}
    return tensor.to(down(device), **options)


def _nothing(tensor: Any, s: Any) -> None:
    """Replaces `Tensor.record_stream`."""


def _filled(func: Any, args: Any, kwargs: Any) -> Any:
    """Creates a tensor of given values on the processor, and moves it with an operator."""
    device = kwargs.get("device")
    if not is_cuda(device):
        return NotImplemented
    options = {name: value for name, value in kwargs.items() if name not in ("device", "requires_grad")}
    if _devices.CURRENT_DEVICE is not None:  # it counts where none is given
        options["device"] = down(args[0].device) if args and isinstance(args[0], _Tensor) else "cpu"
    tensor = func(*args, **options).to(down(device))  # the mode is off in here
    return tensor.requires_grad_() if kwargs.get("requires_grad") else tensor


def _coo(func: Any, args: Any, kwargs: Any) -> Any:
    """Moves indices and values given as lists or on the processor, which torch does without an operator."""
    device = kwargs.get("device")
    if not is_cuda(device) or len(args) < 2:
        return NotImplemented
    parts = (each if is_on_device(each) else _filled(torch.as_tensor, (each,), {"device": device}) for each in args[:2])
    return func(*parts, *args[2:], **{**kwargs, "device": down(device)})


def _new_tensor(_func: Any, args: Any, kwargs: Any) -> Any:
    tensor, data = args
    return _filled(torch.tensor, (data,), {"device": tensor.device, "dtype": tensor.dtype, **kwargs})


def _ctc(func: Any, args: Any, kwargs: Any) -> Any:
    """Moves lengths to the device: of plain tensors torch reads them on the processor, of fake ones it cannot.

    Source: ctc_loss, aten/src/ATen/native/LossCTC.cpp.
    """
    if len(args) < 4 or not is_on_device(args[0]) or all(map(is_on_device, args[2:4])):
        return NotImplemented
    lengths = (each.to(FACE) if isinstance(each, _Tensor) else _on_its_device(args[0], each) for each in args[2:4])
    return func(*args[:2], *lengths, *args[4:], **kwargs)


def _get(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, index = args
    found = _as_tensors(tensor, index)
    return NotImplemented if found is index else func(tensor, found, **kwargs)


def _set(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, index, value = args
    found = _as_tensors(tensor, index)
    if type(value) in _NUMBERS and is_on_device(tensor) and not _has_tensors(found):
        value = torch.tensor(value, dtype=tensor.dtype)  # stays on the processor; C++ fills with it
        return func(tensor, found, value, **kwargs)
    return NotImplemented if found is index else func(tensor, found, value, **kwargs)


def _has_tensors(index: Any) -> bool:
    return any(isinstance(one, _Tensor) for one in (index if isinstance(index, tuple) else (index,)))


def _as_tensors(tensor: Any, index: Any) -> Any:
    """Returns an index whose lists of numbers are tensors on the indexed tensor's device, as C++ creates them."""
    if isinstance(index, list):
        is_tuple = any(isinstance(item, _OF_TUPLES) for item in index)
        return _as_tensors(tensor, tuple(index)) if is_tuple else _on_its_device(tensor, index)
    if isinstance(index, tuple) and any(isinstance(item, list) for item in index):
        return tuple(_on_its_device(tensor, item) if isinstance(item, list) else item for item in index)
    return index


def _on_its_device(tensor: Any, numbers: Any) -> Any:
    made = torch.tensor(numbers)
    made = made if made.numel() else made.long()  # torch infers float32 for an empty list
    return made.to(FACE) if is_on_device(tensor) else made
