"""Runs an operator for real, once and on zeros, to learn what its kernel takes that no shape tells."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._C import _profiler
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.profiler.native import NativeEvents, allocations
from memprof.recorder.profiler.profiler_guard import ProfilerGuard
from memprof.recorder.profiler.sessions import short_session

_aten = torch.ops.aten
#: Operators whose kernels are known to take memory of their own, or to return as much as their library likes.
_TRIED = {
    _aten.conv1d,
    _aten.conv2d,
    _aten.conv3d,
    _aten.convolution,
    _aten.convolution_backward,
    _aten.mkldnn_rnn_layer,
    _aten.mkldnn_rnn_layer_backward,
    _aten.native_batch_norm,
    _aten.native_batch_norm_backward,
    _aten.native_group_norm,
    _aten.native_layer_norm_backward,
    _aten.native_group_norm_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._cdist_backward,
    _aten.embedding_dense_backward,
    _aten.grid_sampler_2d_backward,
    # A loss is reduced within the memory of its terms, of which some kernels return the whole.
    _aten.mse_loss,
    _aten.smooth_l1_loss,
    _aten.huber_loss,
    _aten.binary_cross_entropy,
    _aten.binary_cross_entropy_backward,
    _aten.binary_cross_entropy_with_logits,
    _aten.soft_margin_loss,
    _aten.soft_margin_loss_backward,
}
#: Products, which take memory of their own in the shorter types alone.
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm}
_SHORT = (torch.bfloat16, torch.float16)
#: Operators that wrap a number as a tensor of a few bytes, whatever the size of the other.
_WRAPPING = {
    _aten.add,
    _aten.add_,
    _aten.sub,
    _aten.sub_,
    _aten.rsub,
    _aten.mul,
    _aten.mul_,
    _aten.div,
    _aten.div_,
}
_NUMBERS = (bool, int, float, complex)
#: Operators on more than this are not tried: a dry run must not take the memory and the time that it is to save.
_MOST_BYTES = 128 * 2**20
_LISTS = (list, tuple)


class Kernels:
    """Tries operators in a thread of its own, where no mode and no session of the job's is in force."""

    def __init__(self) -> None:
        """Has tried nothing yet."""
        self._found: dict[Any, tuple[int, list[Any]] | None] = {}
        self._untried: Counter[str] = Counter()
        self._is_available = NativeEvents.is_available()
        ProfilerGuard().install()  # operators are tried until the process ends

    def learn(
        self, func: Any, args: Any, kwargs: Any, result: Any, make: Callable[..., torch.Tensor]
    ) -> tuple[Any, int]:
        """Finds what an operator takes beyond its result, and corrects the size of what it returns.

        Args:
            func: The operator.
            args: Its arguments, without memory.
            kwargs: Its keyword arguments.
            result: Its result, without memory.
            make: Makes a tensor without memory of a size, strides and a type.

        Returns:
            The result, and the bytes that the kernel held at its highest beyond what it returned.
        """
        packet = getattr(func, "overloadpacket", None)
        if not self._is_available:
            return result, 0
        if packet in _WRAPPING and any(type(value) in _NUMBERS for value in args):
            return result, self._wrapped_bytes(func, args, kwargs)
        if packet not in _TRIED and packet not in _PRODUCTS:
            return result, 0
        tensors = [*_tensors(args), *_tensors(tuple(kwargs.values())), *_tensors([result])]
        if any(tensor.device.type != "cpu" or tensor.layout is not torch.strided for tensor in tensors):
            return result, 0
        if packet in _PRODUCTS and all(tensor.dtype not in _SHORT for tensor in tensors):
            return result, 0
        found = self._tried(func, args, kwargs, tensors)
        if found is None:
            self._untried[str(func)] += 1
            return result, 0
        extra_bytes, shapes = found
        return _corrected(result, shapes, make), extra_bytes

    def stand_in(self, func: Any, args: Any, kwargs: Any, make: Callable[..., torch.Tensor]) -> Any:
        """Returns what an operator's kernel returns for zeros, without memory; None where that cannot be had.

        Some rules for tensors without memory know a device's kernel alone, and refuse what the processor's takes:
        that of ``_grouped_mm`` wants bfloat16, as mixtures of experts in float32 do not have it.

        Args:
            func: The operator.
            args: Its arguments, without memory.
            kwargs: Its keyword arguments.
            make: Makes a tensor without memory of a size, strides and a type.
        """
        schema = func._schema
        tensors = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        is_plain = all(tensor.device.type == "cpu" and tensor.layout is torch.strided for tensor in tensors)
        aliases = schema.is_mutable or any(returned.alias_info is not None for returned in schema.returns)
        if not self._is_available or not is_plain or aliases or len(schema.returns) != 1:
            return None
        found = self._tried(func, args, kwargs, tensors)
        if found is None or len(found[1]) != 1:
            return None
        shape, stride, dtype, _ = found[1][0]
        return make(shape, stride, dtype=dtype)

    def _tried(
        self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]
    ) -> tuple[int, list[Any]] | None:
        """Returns what ``_try`` finds, once for arguments alike; None where their tensors are too large to be tried."""
        key = (func, _key(args), _key(tuple(kwargs.items())), torch.is_grad_enabled(), torch.get_num_threads())
        if key not in self._found:
            if sum(tensor.untyped_storage().nbytes() for tensor in tensors) > _MOST_BYTES:
                return None
            self._found[key] = _try(func, args, kwargs)
        return self._found[key]

    def _wrapped_bytes(self, func: Any, args: Any, kwargs: Any) -> int:
        """Returns what wrapping a number takes, tried on tensors of two elements."""
        few = [torch.Size([2]) if isinstance(value, torch.Tensor) else type(value) for value in args]
        types = [value.dtype for value in _tensors(args)]
        key = (func, tuple(few), tuple(types), repr(kwargs))
        if key not in self._found:
            self._found[key] = _try(func, [_two_of(value) for value in args], kwargs)
        found = self._found[key]
        return found[0] if found is not None else 0

    def notes(self) -> list[str]:
        """Names the operators that were not tried."""
        if not self._untried:
            return []
        names = ", ".join(f"{name} ({count:,})" for name, count in self._untried.most_common())
        return [
            f"not counted is what the kernels of these operators, not tried for their size, take themselves: {names}"
        ]


def _try(func: Any, args: Any, kwargs: Any) -> tuple[int, list[Any]] | None:
    """Runs an operator on zeros.

    Returns:
        The bytes beyond its result at its highest, and its outputs' shapes; None where it raised, or nothing could be
        heard of it.
    """
    outcome: list[tuple[int, list[Any]]] = []
    has_gradients = torch.is_grad_enabled()

    def run() -> None:
        # Libraries ask whether gradients are recorded. Zeros that need none record nothing in either case.
        with (
            torch.set_grad_enabled(has_gradients),
            suppress(RuntimeError),
        ):  # zeros are no arguments for it: nothing is learnt
            real_args = [_real(value) for value in args]
            real_kwargs = {name: _real(value) for name, value in kwargs.items()}
            if func is _aten.mkldnn_rnn_layer_backward.default:
                real_args[-1] = _rnn_workspace(real_args)
            func(*real_args, **real_kwargs)  # a library's first call sets itself up
            heard = _hear(func, real_args, real_kwargs)
            if heard is not None:
                outcome.append(heard)

    thread = threading.Thread(target=run, name="memprof-kernels")
    thread.start()
    thread.join()
    return outcome[0] if outcome else None


def _hear(func: Any, args: Any, kwargs: Any) -> tuple[int, list[Any]] | None:
    """Runs an operator and hears what it takes; None where the job's own profiler warms up or runs."""
    with short_session() as session:
        if not session.start(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=True):
            return None
        result = func(*args, **kwargs)
        heard = session.stop()
    total = highest = 0
    for event in sorted(allocations(heard), key=lambda event: event.start_time_ns):
        total += event.extra_fields.alloc_size
        highest = max(highest, total)
    outputs = result if isinstance(result, _LISTS) else [result]
    shapes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in _tensors(outputs)]
    if isinstance(result, torch.Tensor):
        # Its storage may be longer than it is.
        return highest - total, [(*shapes[0], result.untyped_storage().nbytes())]
    return highest - total, [(*shape, 0) for shape in shapes]


def _rnn_workspace(args: list[Any]) -> Any:
    """Returns what the forward of a layer leaves for its backward: the library's own, which zeros do not stand for.

    Args:
        args: Arguments of ``mkldnn_rnn_layer_backward``.
    """
    reverse, mode, hidden_size, layers, has_biases, train, is_bidirectional, batch_sizes, is_batch_first = args[13:22]
    settings = (reverse, batch_sizes, mode, hidden_size, layers, has_biases, is_bidirectional, is_batch_first, train)
    with torch.enable_grad():
        return _aten.mkldnn_rnn_layer.default(*args[:7], *settings)[-1]


def _corrected(result: Any, shapes: list[Any], make: Callable[..., torch.Tensor]) -> Any:
    """Returns a result whose tensors are as large as the kernel's were, and laid out as they were."""
    if isinstance(result, torch.Tensor):
        return _corrected([result], shapes, make)[0]
    if not isinstance(result, _LISTS) or len(_tensors(result)) != len(shapes):
        return result
    wanted = iter(shapes)
    items = []
    for item in result:
        if isinstance(item, torch.Tensor):
            items.append(_as_made(item, next(wanted), make))
        else:
            items.append(item)
    return result if all(map(operator.is_, result, items)) else items if isinstance(result, list) else tuple(items)


def _as_made(item: torch.Tensor, made: Any, make: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Returns a tensor that is as the kernel's was, of its storage's size."""
    shape, stride, dtype, storage_bytes = made
    if storage_bytes > item.untyped_storage().nbytes():
        return make((storage_bytes // dtype.itemsize,), (1,), dtype=dtype).as_strided(shape, stride)
    is_alike = (item.shape, item.stride(), item.dtype) == (shape, stride, dtype)
    return item if is_alike else make(shape, stride, dtype=dtype)


def _two_of(value: Any) -> Any:
    """Returns two zeros of a tensor's type, with data."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C._DisableTorchDispatch():
        return torch.zeros(2, dtype=value.dtype, device="cpu")


def _real(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        size = value.untyped_storage().nbytes() // value.element_size()
        zeros = torch.zeros((size,), dtype=value.dtype)
        return zeros.as_strided(value.shape, value.stride(), value.storage_offset())
    return type(value)(_real(item) for item in value) if type(value) in _LISTS else value


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, _LISTS):
            found += _tensors(value)
    return found


def _key(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset()
    if isinstance(value, _LISTS):
        return tuple(_key(item) for item in value)
    return repr(value)
