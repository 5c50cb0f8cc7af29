"""Finds the tensor whose autograd graph holds memory: the nodes of the operators that made it are in that graph."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch

_Line = TypeVar("_Line")
#: Nodes of one graph that are followed.
_MOST_NODES = 5_000


def graph_holders(lines: Mapping[_Line, frozenset[int]], computed: list[torch.Tensor]) -> dict[_Line, torch.Tensor]:
    """Returns, for lines whose tensors only a graph holds, a tensor that this graph belongs to.

    Args:
        lines: The sequence numbers of the autograd nodes of each line's operators.
        computed: Tensors with a graph, those to be preferred first.
    """
    owner = {number: line for line, numbers in lines.items() for number in numbers}
    found: dict[_Line, torch.Tensor] = {}
    for tensor in computed if owner else ():
        for number in _nodes(tensor, min(owner)):
            if number in owner:
                found.setdefault(owner[number], tensor)
        if len(found) == len(lines):
            break
    return found


def _nodes(tensor: torch.Tensor, lowest: int) -> Iterator[int]:
    """Yields the sequence numbers of the nodes of a tensor's graph, none below the lowest.

    A node has a higher number than those that it leads to. The lowest that is known is followed first: of a loss summed
    over steps, that is the sum of the step before.
    """
    root = tensor.grad_fn
    if root is None:
        return
    seen = {root._sequence_nr()}
    waiting = [(root._sequence_nr(), root)]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        number, node = heapq.heappop(waiting)
        yield number
        for following, _ in node.next_functions:
            if following is None:
                continue
            number = following._sequence_nr()
            if number >= lowest and number not in seen:  # so that no two in the heap have the same
                seen.add(number)
                heapq.heappush(waiting, (number, following))
