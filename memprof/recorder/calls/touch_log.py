"""Logs the memory that operators read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.calls.operator_traits import OperatorTraits
from memprof.recorder.log import RawLog
from memprof.recorder.memory.tensor_memory import parts_of
from memprof.trace.files.spool import FLAG_MUTATES, FLAG_VIEW, MUTATE, READ, WRITE

_Tensor = torch.Tensor
_STRIDED = torch.strided
_LISTS = (list, tuple)
_MAKES_NOTHING = FLAG_VIEW | FLAG_MUTATES


class TouchLog:
    """Logs which memory each operator reads, changes and makes.

    Attributes:
        on_output: Called with every output tensor and the time, if the event source needs it; else None.
        span: Returns the address of a tensor's memory and the tensor's own bytes.
    """

    def __init__(self, log: RawLog) -> None:
        """Stores the recorder's log."""
        self._log = log
        self._tensor_number = log.tensor_number
        self.on_output: Callable[[torch.Tensor, int], None] | None = None
        self.span: Callable[[torch.Tensor], tuple[int, int]] = _span

    def add(
        self, op: int, operator: OperatorTraits, args: Any, kwargs: Any, result: Any, flags: int, end_ns: int
    ) -> tuple[int, int]:
        """Logs the memory that an operator read and wrote.

        Returns:
            The bytes it read and the bytes it wrote.
        """
        touches = self._log.touches
        span = self.span
        read_bytes = written_bytes = 0
        mutated = operator.mutated
        for position, value in enumerate(args):
            if isinstance(value, _Tensor) and value.layout is _STRIDED:
                address, size = span(value)
                if position in mutated:
                    written_bytes += size
                    if position not in operator.filled:
                        read_bytes += size
                    touches.extend((op, address, size, MUTATE, -1))
                else:
                    read_bytes += size
                    touches.extend((op, address, size, READ, -1))
            elif isinstance(value, _Tensor) or type(value) in _LISTS:
                values = (value,) if isinstance(value, _Tensor) else value
                size = self._touch_all(op, values, is_mutated=position in mutated)
                read_bytes += size
                if position in mutated:
                    written_bytes += size
        if kwargs:
            for key, value in kwargs.items():
                if isinstance(value, _Tensor) or type(value) in _LISTS:
                    is_mutated = key in operator.mutated_keywords
                    values = (value,) if isinstance(value, _Tensor) else value
                    size = self._touch_all(op, values, is_mutated=is_mutated)
                    if is_mutated:
                        written_bytes += size
                    if key not in operator.filled_keywords:
                        read_bytes += size
        # Outputs. A view's base is already an input; so is an in-place result.
        makes_new = not flags & _MAKES_NOTHING
        on_output = self.on_output
        if makes_new or on_output is not None:
            for item in (result,) if isinstance(result, _Tensor) and result.layout is _STRIDED else tensors_of(result):
                if makes_new:
                    address, size = span(item)
                    touches.extend((op, address, size, WRITE, self._tensor_number(item)))
                    written_bytes += size
                if on_output is not None:
                    on_output(item, end_ns)  # even for an in-place operator: it may have resized its input
        return read_bytes, written_bytes

    def _touch_all(self, op: int, values: Any, *, is_mutated: bool) -> int:
        """Logs the tensors among some values as inputs; returns their bytes."""
        touches, span = self._log.touches, self.span
        access, total = MUTATE if is_mutated else READ, 0
        for value in values:
            if isinstance(value, _Tensor):
                for plain in (value,) if value.layout is _STRIDED else parts_of(value) or (value,):
                    address, size = span(plain)
                    total += size
                    touches.extend((op, address, size, access, -1))
        return total


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's storage and the tensor's own bytes; (0, 0) without a storage."""
    try:
        return tensor.untyped_storage().data_ptr(), tensor.nbytes
    except (NotImplementedError, RuntimeError):
        return 0, 0  # opaque and meta tensors


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors among values, in lists and tuples too; sparse ones as the tensors they consist of."""
    if isinstance(value, _Tensor):
        return [value] if value.layout is _STRIDED else list(parts_of(value)) or [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []
