"""Numbers of tokens that a router sends to each expert: equal shares, and more for the experts of this rank.

They depend on values that a dry run does not compute. Splits of an all-to-all and groups of a grouped product are sized
by them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.virtual.ranks.collectives import resolve_group
from memprof.virtual.values.known import has_shares, known, note_shares, shares_of
from memprof.virtual.values.nonzeros import most_marked

_aten = torch.ops.aten


def _operator(space: str, name: str) -> Any:
    """Returns an operator; None in a torch without distributed."""
    packet = getattr(getattr(torch.ops, space), name, None)
    return None if packet is None else packet.default


_EXCHANGE, _EXCHANGED = _operator("c10d", "alltoall_base_"), _operator("_c10d_functional", "all_to_all_single")
_GATHER, _GATHERED = _operator("c10d", "_allgather_base_"), _operator("_c10d_functional", "all_gather_into_tensor")


class Routing:
    """Follows counts of tokens from where a router counts them to where ranks have exchanged them."""

    def __init__(self, load: float) -> None:
        """Keeps the imbalance.

        Args:
            load: Tokens that the experts of each dry-run rank receive, as a multiple of their equal share.
        """
        self._load = load
        self._exchanges = 0

    def follow(self, func: Any, args: Any, result: Any) -> None:
        """Notes counts that an operator computes or exchanges."""
        if func in _COUNTED:
            total = _COUNTED[func](args, result) if known(result) is None else None
            if total is not None:
                note_shares(result, _equal_shares(total, result))
        elif func is _EXCHANGE or func is _EXCHANGED:
            sent, received = (args[1], args[0]) if func is _EXCHANGE else (args[0], result)
            if has_shares(sent) and sent.shape == received.shape:
                self._exchanges += 1
                note_shares(received, _times(shares_of(sent), self._load))
        elif func is _GATHER or func is _GATHERED:
            sent, received = (args[1], args[0]) if func is _GATHER else (args[0], result)
            if has_shares(sent) and sent.numel():
                self._exchanges += 1
                place = int(resolve_group(args[2]).rank())
                note_shares(received, self._gathered(shares_of(sent), received, place))

    def notes(self) -> list[str]:
        """Returns notes on the routing for the reader of the trace."""
        if not self._exchanges:
            return []
        load = f"{self._load:g} times their equal share of all ranks' tokens (--expert-load)"
        return [f"where ranks exchange counts of tokens, the experts of each rank receive {load}"]

    def _gathered(self, shares: torch.Tensor, received: torch.Tensor, place: int) -> torch.Tensor:
        """Returns what all ranks send to all experts, of which this rank has those at its place in the group.

        The others share what is left.
        """
        ranks = received.numel() // shares.numel()
        table = shares.flatten().repeat(ranks, 1).double()
        own = slice(place * shares.numel() // ranks, (place + 1) * shares.numel() // ranks)
        is_own = torch.zeros(shares.numel(), dtype=torch.bool)
        is_own[own] = True
        rest = (ranks - self._load) / (ranks - 1) if ranks > 1 else 1.0
        table = torch.where(is_own, table * self._load, table * max(rest, 0.0))
        return table.ceil().to(received.dtype).view(received.shape)


def _equal_shares(total: int, like: torch.Tensor) -> torch.Tensor:
    """Returns whole numbers that add up to a total and differ by one at most."""
    count = max(like.numel(), 1)
    shares = torch.full((like.numel(),), total // count, dtype=torch.int64)
    shares[: total % count] += 1
    return shares.to(like.dtype).view(like.shape)


def _times(shares: torch.Tensor, load: float) -> torch.Tensor:
    return (shares.double() * load).ceil().to(shares.dtype)


def _of_sum(args: Any, result: Any) -> int | None:
    """Returns how many marks a sum over all tokens counts, one result for each expert; None for other sums."""
    tensor = args[0]
    is_mask = isinstance(tensor, FakeTensor) and not tensor.dtype.is_floating_point
    is_counted = is_mask and isinstance(result, FakeTensor) and 1 < result.numel() < tensor.numel()
    return most_marked(tensor) if is_counted else None


def _elements(args: Any, result: Any) -> int | None:
    return args[0].numel() if isinstance(result, FakeTensor) else None


def _of_bincount(args: Any, result: Any) -> int | None:
    """Returns how many elements it counts; None where it sums their weights instead."""
    has_weights = len(args) > 1 and args[1] is not None
    return None if has_weights else _elements(args, result)


#: Operators that count tokens, and how many they count in all.
_COUNTED: dict[Any, Callable[[Any, Any], int | None]] = {
    _aten.bincount.default: _of_bincount,
    _aten.histc.default: _elements,
    _aten.sum.dim_IntList: _of_sum,
}
