"""What every run of an operator has in common, such as the arguments it writes, and whether it is a repetition."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from memprof.hidden_import import import_hidden
from memprof.recorder.calls import higher_order
from memprof.recorder.calls.read_values import is_read
from memprof.recorder.calls.untraced import is_traced_inside, traced_inside
from memprof.trace.files.spool import FLAG_COLLECTIVE, FLAG_COPY, FLAG_MUTATES, FLAG_RNG, FLAG_VIEW

_FLOP_COUNTER = "torch.utils.flop_counter"
_Tensor = torch.Tensor
#: Autograd's sequence number at the first run of the operator being rerun; -1 while none is.
sequence = -1


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
        self.is_higher_order = higher_order.is_higher_order(operator)
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
            written = [
                (i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
            ]
            self.mutated = frozenset(i for i, a in written if not a.kwarg_only)
            self.mutated_keywords = frozenset(a.name for _, a in written)
            self.filled_keywords = frozenset(a.name for _, a in written if a.is_out)
            if written:
                self.flags |= FLAG_MUTATES
            if not written and any(r.alias_info is not None for r in schema.returns):
                self.flags |= FLAG_VIEW
        if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()):
            self.flags |= FLAG_RNG
        namespace = getattr(operator, "namespace", "")
        if namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self.flags |= FLAG_COLLECTIVE
        if str(operator) in ("aten._to_copy.default", "aten.copy_.default"):
            self.flags |= FLAG_COPY
        self._formula = _flop_formulas().get(getattr(operator, "overloadpacket", None))
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
    own = sys.modules.get(_FLOP_COUNTER)
    formulas: dict[Any, Callable[..., int]] = (
        getattr(own, "flop_registry", None) or _hidden_flop_counter().flop_registry
    )
    return formulas


@cache
def _hidden_flop_counter() -> Any:
    return import_hidden(_FLOP_COUNTER, "torch.utils.module_tracker")


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
