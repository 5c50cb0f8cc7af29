"""Follows small integer tensors whose values are certain, though they are on a device or met a tensor without values.

Sizes and ends of loops depend on them: the number of graphs in a batch is its largest index plus one, text is generated
until `torch.full((batch,), length >= most)` is true. So do conditions on a few random numbers of the processor: layers
are skipped if `torch.rand(1) < 0.1`. These values are those of a real run, not placeholders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from memprof.recorder.calls.dispatch_modes import tensors_in
from memprof.recorder.calls.torch_state import packets
from memprof.trace.operator_facts import DISJUNCTIONS, ONES, ZEROS
from memprof.virtual.values.overwritten import is_integral, stand_in, written
from memprof.virtual.values.random_stream import MOST_KEPT

_aten = torch.ops.aten
#: Attribute of a fake tensor: its `_Values`.
_KNOWN = "_memprof_known"
#: Attribute of a fake storage: how often operators wrote to it.
_WRITES = "_memprof_writes"
#: Values of larger tensors are not kept.
_MOST_ELEMENTS = 2**16

#: Operators that create data.
_DATA = packets("arange eye full ones zeros scalar_tensor randint randperm")
_RANGES = packets("arange linspace")
_MOST_OF_RANGE = 2**10

_CREATED = packets(ZEROS | ONES) | packets("arange full full_like new_full scalar_tensor eye")
#: Operators that change their first argument in place, and nothing else.
_CHANGES = packets("""
    scatter_add_ scatter_ scatter_reduce_ index_put_ index_add_ index_fill_ masked_fill_ fill_ zero_ copy_ add_ sub_
    mul_ clamp_
""")
#: Operators that fill a tensor with one value other than zero: a mask that hides nothing is often of floats.
_FILLED = {
    **dict.fromkeys(packets(ONES), lambda _: 1),
    **dict.fromkeys((_aten.full, _aten.full_like), lambda args: args[1]),
    _aten.new_full: lambda args: args[2],
}
_AND = packets("bitwise_and logical_and __and__ mul")
_OR = packets(DISJUNCTIONS)
_COMPUTED = (
    _AND
    | _OR
    | packets("""
        _to_copy alias clone detach expand index index_select repeat select slice squeeze unsqueeze view _unsafe_view
        permute t transpose reshape cat stack gather where amax amin max min sum cumsum prod diff bincount all any
        _is_all_true _is_any_true isin repeat_interleave eq ne lt le gt ge add sub rsub neg floor_divide remainder clamp
        clamp_min clamp_max masked_fill logical_not bitwise_not bitwise_xor logical_xor nonzero masked_select
    """)
)
#: Operators that return the parts of their first argument.
_DIVIDED = packets("split split_with_sizes unbind")


@dataclass(frozen=True, eq=False)
class _Values:
    """Values on the processor, and how often a tensor's storage had been written to by then.

    Shares are what an equal division gives, not what a real run computes, and may be of a floating-point type.
    """

    values: torch.Tensor
    writes: int
    are_shares: bool = False

    def __deepcopy__(self, memo: Any) -> _Values:
        """Returns itself: copies of a model's tensors share what is never written to, and take no memory for it."""
        return self


@dataclass(frozen=True, eq=False)
class _Filling:
    """One value of all elements of a floating-point tensor, which takes no memory of its own."""

    value: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    writes: int
    are_shares: bool = False

    @property
    def values(self) -> torch.Tensor:
        """The values on the processor."""
        return torch.full(self.shape, self.value, dtype=self.dtype)

    def __deepcopy__(self, memo: Any) -> _Filling:
        """Returns itself, as above."""
        return self


def is_data(func: Any, result: Any) -> bool:
    """Whether an operator creates data on which sizes may depend.

    Integers like a loader's (lengths, positions and masks), and short ranges, of which models compute the widths and
    rates of their layers.
    """
    packet = getattr(func, "overloadpacket", None)
    if not isinstance(result, FakeTensor) or result.device.type != "cpu":
        return False
    if packet in _RANGES and result.numel() <= _MOST_OF_RANGE:
        return True
    return packet in _DATA and _is_kept(result)


def known(tensor: Any) -> torch.Tensor | None:
    """Returns the values of a tensor on the processor; None where they are not known."""
    if isinstance(tensor, FakeTensor):
        kept: _Values | _Filling | None = getattr(tensor, _KNOWN, None)
        return kept.values if kept is not None and kept.writes == _writes(tensor) else None
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    is_known = is_plain and tensor.device.type == "cpu" and _is_kept(tensor) and stand_in(tensor) is None
    return tensor if is_known else None


def follow_values(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Notes the values of an operator's result where they are certain; forgets those of tensors that it writes to."""
    if func._schema.is_mutable:
        changed = _changed(func, args, kwargs)
        for tensor in _fakes(list(written(func, args, kwargs))):
            setattr(tensor.untyped_storage(), _WRITES, _writes(tensor) + 1)
        if changed is not None:
            note(args[0], changed)
    elif isinstance(result, FakeTensor) and _is_filled(func, args, result):
        value = _FILLED[func.overloadpacket](args)
        setattr(result, _KNOWN, _Filling(value, tuple(result.shape), result.dtype, _writes(result)))
        setattr(result.untyped_storage(), _WRITES, _writes(result))
    elif isinstance(result, FakeTensor) and (_is_kept(result) or any(map(has_shares, args))):
        values = compute(func, args, kwargs)
        if values is None:
            values = _absorbed(getattr(func, "overloadpacket", None), args, result)
        if values is not None and values.shape == result.shape and values.dtype is result.dtype:
            setattr(result, _KNOWN, _Values(values, _writes(result), any(map(has_shares, args))))
    elif getattr(func, "overloadpacket", None) in _DIVIDED and (whole := known(args[0])) is not None:
        for part, values in zip(result, func(whole, *args[1:], **kwargs), strict=True):
            note(part, values)


def has_shares(value: Any) -> bool:
    """Whether a tensor's values are shares of a number that was divided equally, or a list has such a tensor."""
    if isinstance(value, (list, tuple)):
        return any(map(has_shares, value))
    kept: _Values | _Filling | None = getattr(value, _KNOWN, None) if isinstance(value, FakeTensor) else None
    return kept is not None and kept.are_shares and kept.writes == _writes(value)


def shares_of(tensor: Any) -> torch.Tensor:
    """Returns the values of a tensor that has shares."""
    kept: _Values = getattr(tensor, _KNOWN)
    return kept.values


def note_shares(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Notes shares as the values of a tensor."""
    setattr(tensor, _KNOWN, _Values(values, _writes(tensor), are_shares=True))


def note(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Notes the values of a tensor."""
    setattr(tensor, _KNOWN, _Values(values, _writes(tensor)))


def carry(source: Any, target: FakeTensor) -> None:
    """Notes what is known of a tensor for one that has been given its memory, and forgets what was known of that."""
    kept = getattr(source, _KNOWN, None)
    if kept is not None or hasattr(target, _KNOWN):
        setattr(target, _KNOWN, kept)


def compute(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Returns an operator's result on the processor, if all its tensors are known; otherwise None."""
    packet = getattr(func, "overloadpacket", None)
    if packet not in _CREATED and packet not in _COMPUTED:
        return None
    return _run(func, args, kwargs, has_inputs=packet not in _CREATED or isinstance((args or (None,))[0], torch.Tensor))


def write(func: Any, args: Any, kwargs: Any) -> bool:
    """Runs an operator that writes to a tensor with data, if all its arguments are known; returns whether it ran."""
    if getattr(func, "overloadpacket", None) not in _CHANGES or known(args[0]) is not args[0]:
        return False
    return _run(func, args, kwargs) is not None


def _changed(func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Returns the values of a fake tensor after an operator has changed it in place; None where they are not known."""
    is_change = getattr(func, "overloadpacket", None) in _CHANGES and isinstance(args[0], FakeTensor)
    before = known(args[0]) if is_change and _is_kept(args[0]) else None
    return None if before is None else _run(func, (before.clone(), *args[1:]), kwargs)


def _run(func: Any, args: Any, kwargs: Any, *, has_inputs: bool = True) -> torch.Tensor | None:
    """Runs an operator on the processor, if all its tensors are known; otherwise returns None."""
    is_unknown = False

    def lookup(value: Any) -> Any:
        nonlocal is_unknown
        if not isinstance(value, torch.Tensor):
            return value
        values = known(value)
        is_unknown = is_unknown or values is None
        return values

    if has_inputs:
        args, kwargs = tree_map(lookup, (args, kwargs))
    if is_unknown:
        return None
    # Its device is the dry run's; a copy is never pinned.
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "non_blocking")}
    values = func(*args, **kwargs)
    return values if isinstance(values, torch.Tensor) else None


def _absorbed(packet: Any, args: Any, result: FakeTensor) -> torch.Tensor | None:
    """Returns the result of a conjunction with what is false, and of a disjunction with what is true."""
    if packet not in _AND and (packet not in _OR or result.dtype is not torch.bool):
        return None
    decisive = packet in _OR
    for value in args[:2]:
        values = known(value) if isinstance(value, torch.Tensor) else None
        if values is not None and values.numel() and bool((values != 0).all() if decisive else (values == 0).all()):
            return torch.full(tuple(result.shape), int(decisive), dtype=result.dtype)
    return None


def _is_kept(tensor: Any) -> bool:
    return is_integral(tensor) and tensor.numel() <= _MOST_ELEMENTS


def _is_filled(func: Any, args: Any, result: FakeTensor) -> bool:
    is_number = getattr(func, "overloadpacket", None) in _FILLED and not any(
        isinstance(value, torch.Tensor) for value in args[1:]
    )
    return is_number and result.dtype.is_floating_point and result.numel() <= _MOST_ELEMENTS


def _fakes(values: list[Any]) -> Iterator[Any]:
    for value in tensors_in(values):
        is_plain = isinstance(value, FakeTensor) and value.layout is torch.strided
        if is_plain and (is_integral(value) or value.numel() <= MOST_KEPT or _is_followed(value)):
            yield value


def _is_followed(tensor: torch.Tensor) -> bool:
    """Whether values in a tensor's memory were known once."""
    return hasattr(tensor.untyped_storage(), _WRITES) or has_shares(tensor)


def _writes(tensor: torch.Tensor) -> int:
    count: int = getattr(tensor.untyped_storage(), _WRITES, 0)
    return count
