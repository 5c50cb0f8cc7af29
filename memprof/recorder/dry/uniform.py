"""Follows integer tensors whose elements all have one value that is certain, though nothing is computed.

Loops that generate text end when a length is reached: ``torch.full((batch,), length >= most)`` on the device, joined by
``|`` and ``&`` with what depends on the tokens. Such a value is that of a real run, not a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
#: Attribute of a fake tensor: the value, and how often its storage had been written to by then.
_KNOWN = "_memprof_uniform"
#: Attribute of a fake storage: how often operators wrote to it.
_WRITES = "_memprof_writes"
#: Data of more elements is not read.
_MOST_ELEMENTS = 2**16

_FILLS: dict[Any, Callable[..., Any]] = {
    _aten.full: lambda _size, value, **_: value,
    _aten.full_like: lambda _tensor, value, **_: value,
    _aten.new_full: lambda _tensor, _size, value, **_: value,
    _aten.fill: lambda _tensor, value, **_: value,
    _aten.fill_: lambda _tensor, value, **_: value,
    **dict.fromkeys((_aten.ones, _aten.ones_like, _aten.new_ones), lambda *_, **__: 1),
    **dict.fromkeys((_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.zero_), lambda *_, **__: 0),
}
#: Operators whose results have no values but those of their first argument.
_SAME = {
    *(_aten.alias, _aten.amax, _aten.amin, _aten.clone, _aten.detach, _aten.expand, _aten.index, _aten.index_select),
    *(_aten.max, _aten.min, _aten.repeat, _aten.select, _aten.slice, _aten.squeeze, _aten.unsqueeze, _aten.view),
    *(_aten._unsafe_view, _aten.permute, _aten.t, _aten.transpose, _aten.reshape),
}
_TRUTH = {_aten.all, _aten.any, _aten._is_all_true, _aten._is_any_true}
_COMPARED: dict[Any, Callable[[Any, Any], Any]] = {
    _aten.eq: lambda a, b: a == b,
    _aten.ne: lambda a, b: a != b,
    _aten.lt: lambda a, b: a < b,
    _aten.le: lambda a, b: a <= b,
    _aten.gt: lambda a, b: a > b,
    _aten.ge: lambda a, b: a >= b,
}
_AND = {_aten.bitwise_and, _aten.bitwise_and_, _aten.logical_and, _aten.logical_and_, _aten.__and__, _aten.mul, _aten.mul_}
_OR = {_aten.bitwise_or, _aten.bitwise_or_, _aten.logical_or, _aten.logical_or_, _aten.__or__}
_NOT = {_aten.logical_not, _aten.logical_not_, _aten.bitwise_not, _aten.bitwise_not_}


def uniform(tensor: Any) -> int | bool | None:
    """Returns the value that all elements of an integer tensor have; None where that is not known.

    Args:
        tensor: A tensor without values, or one with data.
    """
    if isinstance(tensor, FakeTensor):
        known: tuple[Any, int] | None = getattr(tensor, _KNOWN, None)
        return known[0] if known is not None and known[1] == _writes(tensor) else None
    if not 0 < tensor.numel() <= _MOST_ELEMENTS or not _is_whole(tensor) or tensor.device.type != "cpu":
        return None
    values = set(tensor.flatten().tolist())
    return values.pop() if len(values) == 1 else None


def follow(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Notes the value of an operator's result where it is certain, and forgets those of tensors that it writes to.

    Args:
        func: The operator.
        args: Its arguments, with data where they have it.
        kwargs: Its keyword arguments.
        result: Its result.
    """
    if isinstance(result, FakeTensor):
        if not _is_whole(result):
            return
        value = _value(getattr(func, "overloadpacket", None), args, kwargs, result)
    else:
        value = None
    if func._schema.is_mutable:
        for tensor in _fakes((*args, *kwargs.values())):
            setattr(tensor.untyped_storage(), _WRITES, _writes(tensor) + 1)
    if value is not None:
        value = bool(value) if result.dtype is torch.bool else int(value)
        setattr(result, _KNOWN, (value, _writes(result)))


def _value(packet: Any, args: Any, kwargs: Any, result: Any) -> Any:
    fill = _FILLS.get(packet)
    if fill is not None:
        value = fill(*args, **kwargs)
        return value if isinstance(value, (bool, int)) else None
    if packet in _SAME or packet in _TRUTH or (packet is _aten._to_copy and _is_whole(args[0])):
        return _operand(args[0])
    if packet in _NOT:
        value = _operand(args[0])
        return None if value is None or result.dtype is not torch.bool else not value
    is_and, is_or, compare = packet in _AND, packet in _OR, _COMPARED.get(packet)
    if not (is_and or is_or or compare) or len(args) < 2:
        return None
    first, second = _operand(args[0]), _operand(args[1])
    if is_and and (_is_false(first) or _is_false(second)):
        return 0
    if is_or and result.dtype is torch.bool and (first is True or second is True):
        return True
    if first is None or second is None:
        return None
    if compare is not None:
        return compare(first, second)
    if packet in (_aten.mul, _aten.mul_):
        return first * second
    if packet in (_aten.logical_and, _aten.logical_and_):
        return bool(first) and bool(second)
    return first & second if is_and else (first | second)


def _operand(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return uniform(value)
    return value if isinstance(value, (bool, int)) else None


def _is_false(value: Any) -> bool:
    return value is not None and value == 0


def _is_whole(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _fakes(values: Any) -> Iterator[FakeTensor]:
    for value in values:
        if isinstance(value, FakeTensor):
            if _is_whole(value) and value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _fakes(value)


def _writes(tensor: FakeTensor) -> int:
    count: int = getattr(tensor.untyped_storage(), _WRITES, 0)
    return count
