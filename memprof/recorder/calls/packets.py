"""Torch's operators by their names, for tables of what a dispatch mode does with each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def packets(names: Iterable[str] | str) -> frozenset[Any]:
    """Returns operators of torch's own, each with all overloads; names in one text are divided by spaces."""
    return frozenset(getattr(torch.ops.aten, name) for name in _each(names))


def overloads(names: Iterable[str] | str) -> frozenset[Any]:
    """Returns the default overload of each."""
    return frozenset(packet.default for packet in packets(names))


def _each(names: Iterable[str] | str) -> Iterable[str]:
    return names.split() if isinstance(names, str) else names
