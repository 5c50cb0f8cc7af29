"""Collectives that return one of their arguments, where torch's shape functions may return a new tensor."""

from __future__ import annotations

from typing import Any

import torch

_FUNCTIONAL: Any = torch.ops._c10d_functional
_FIRST = ("wait_tensor", "all_reduce_", "broadcast_", "all_reduce_coalesced_")
_OUT = ("all_gather_into_tensor_out", "reduce_scatter_tensor_out")


def _operators(names: tuple[str, ...]) -> frozenset[Any]:
    """Returns operators by their names; a torch without distributed has none."""
    packets = [getattr(_FUNCTIONAL, name, None) for name in names]
    return frozenset(packet.default for packet in packets if packet is not None)


_RETURNS_FIRST, _RETURNS_OUT = _operators(_FIRST), _operators(_OUT)


def returned_argument(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the argument that a collective returns unchanged; None for other operators.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    if func in _RETURNS_FIRST:
        return args[0]
    return kwargs["out"] if func in _RETURNS_OUT else None
