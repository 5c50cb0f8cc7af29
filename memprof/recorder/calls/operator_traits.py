"""What an operator reads and writes: what all its runs have in common, and the log of memory they touch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from memprof.hidden_import import import_hidden
from memprof.recorder.calls import dispatch_modes
from memprof.recorder.calls.read_values import is_read
from memprof.recorder.calls.torch_state import is_traced_inside, traced_inside
from memprof.recorder.log import RawLog
from memprof.recorder.memory.tensor_memory import PLAIN, parts_of
from memprof.trace.files.spool import FLAG_COLLECTIVE, FLAG_COPY, FLAG_MUTATES, FLAG_RNG, FLAG_VIEW, MUTATE, READ, WRITE
from memprof.trace.operator_facts import COLLECTIVE_SPACES, TRANSFERS, is_among, is_view, written_arguments

_FLOP_COUNTER = "torch.utils.flop_counter"
_Tensor = torch.Tensor
#: Autograd's sequence number at the first run of the operator being rerun; -1 while none is.
sequence = -1
_STRIDED = torch.strided
_LISTS = (list, tuple)
_MAKES_NOTHING = FLAG_VIEW | FLAG_MUTATES


class OperatorTraits:
    """Properties shared by every run of one operator.

    Attributes:
        call: Runs it.
        filled: Positions of the arguments that it writes to without reading them.
        filled_keywords: Names of the arguments that it writes to without reading them.
        flags: Flags of the `operators` stream that every run has.
        has_flops: Whether torch has a formula for its FLOPs.
        is_higher_order: Whether it takes functions.
        is_read: Whether it returns a value of a tensor, or a result whose size depends on values.
        mutated: Positions of the arguments that it writes to.
        mutated_keywords: Names of the arguments that it writes to.
        name: The number of its name.
    """

    __slots__ = (
        "_flops",
        "_formula",
        "call",
        "filled",
        "filled_keywords",
        "flags",
        "has_flops",
        "is_higher_order",
        "is_read",
        "mutated",
        "mutated_keywords",
        "name",
    )

    def __init__(self, operator: Any, name: int) -> None:
        """Reads an operator's schema and tags.

        Args:
            operator: The operator.
            name: The number of its name.
        """
        self.name = name
        self.is_higher_order = dispatch_modes.is_higher_order(operator)
        self.is_read = is_read(operator)
        # Calling the overload's own entry skips a Python frame; higher-order operators have none.
        self.call: Callable[..., Any] = getattr(operator, "_op", operator)
        if is_traced_inside(operator):
            self.call = partial(_call_traced_inside, operator)
        self.flags = 0
        self.mutated: frozenset[int] = frozenset()
        self.mutated_keywords: frozenset[str] = frozenset()
        self.filled: frozenset[int] = frozenset()
        self.filled_keywords: frozenset[str] = frozenset()
        schema = getattr(operator, "_schema", None)
        if schema is not None:
            written = written_arguments(schema)
            self.mutated = frozenset(i for i, a in written if not a.kwarg_only)
            self.mutated_keywords = frozenset(a.name for _, a in written)
            self.filled_keywords = frozenset(a.name for _, a in written if a.is_out)
            if written:
                self.flags |= FLAG_MUTATES
            if is_view(schema):
                self.flags |= FLAG_VIEW
        if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()):
            self.flags |= FLAG_RNG
        namespace = getattr(operator, "namespace", "")
        if namespace in COLLECTIVE_SPACES:
            self.flags |= FLAG_COLLECTIVE
        if is_among(str(operator), TRANSFERS):
            self.flags |= FLAG_COPY
        packet: Any = getattr(operator, "overloadpacket", None)
        if "_attention_for_cpu" in str(packet):  # torch has formulas for attention on other devices only
            packet = getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""))
        self._formula = _flop_formulas().get(packet)
        self._flops: dict[tuple[Any, ...], int] = {}
        self.has_flops = self._formula is not None

    def count_flops(self, args: Any, kwargs: Any, result: Any) -> int:
        """Returns the FLOPs of a run; 0 where torch's formula does not support its arguments.

        Args:
            args: Its arguments.
            kwargs: Its keyword arguments, or None.
            result: Its result.
        """
        if self._formula is None or any(isinstance(a, _Tensor) and a.is_nested for a in args):
            return 0  # torch's formulas do not support nested tensors
        key = tuple(a.shape if isinstance(a, _Tensor) else a if type(a) in (int, bool) else None for a in args)
        flops = self._flops.get(key)
        if flops is None:
            try:
                flops = int(self._formula(*args, **(kwargs or {}), out_val=result))
            except (AssertionError, TypeError, ValueError, IndexError):
                flops = 0  # a shape that torch's formula does not support
            self._flops[key] = flops
        return flops


def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """Returns torch's FLOP formulas by operator, with the job's own if it has imported their module."""
    own: dict[Any, Callable[..., int]] | None = getattr(sys.modules.get(_FLOP_COUNTER), "flop_registry", None)
    return own or _hidden_flop_counter().flop_registry


@cache
def _hidden_flop_counter() -> Any:
    logger = logging.getLogger(_FLOP_COUNTER)
    was_disabled, logger.disabled = logger.disabled, True  # it warns of a missing triton
    try:
        return import_hidden(_FLOP_COUNTER, "torch.utils.module_tracker")
    finally:
        logger.disabled = was_disabled


def _call_traced_inside(operator: Any, *args: Any, **kwargs: Any) -> Any:
    with traced_inside(operator):
        return operator._op(*args, **kwargs)


def begin(first_sequence: int) -> int:
    """Marks the start of a rerun of an operator.

    Args:
        first_sequence: Autograd's sequence number at its first run.

    Returns:
        The previous mark, for `end`.
    """
    global sequence  # one value per process, read at every logged operator
    before, sequence = sequence, first_sequence
    return before


def end(before: int) -> None:
    """Marks the end of the rerun."""
    global sequence  # noqa: PLW0603 - one value per process, read at every logged operator
    sequence = before


class TouchLog:
    """Logs which memory each operator reads, changes and makes.

    Attributes:
        on_output: Called with every output tensor and the time, if the event source needs it; else None.
        span: Returns the address of a tensor's memory and the tensor's own bytes.
    """

    def __init__(self, log: RawLog) -> None:
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
        storage = tensor.untyped_storage()
        is_fake = type(tensor) not in PLAIN and storage.device.type == "meta"  # its data_ptr would warn the user
        return 0 if is_fake else storage.data_ptr(), tensor.nbytes
    except (NotImplementedError, RuntimeError):
        return 0, 0  # opaque and meta tensors


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors among values, in lists and tuples too; sparse ones as the tensors they consist of."""
    if isinstance(value, _Tensor):
        return [value] if value.layout is _STRIDED else list(parts_of(value)) or [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []
