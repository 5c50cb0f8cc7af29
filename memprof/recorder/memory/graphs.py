"""Finds the tensor whose autograd graph holds memory: the nodes of the operators that made it are in that graph."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TypeVar

import torch

_Line = TypeVar("_Line")
#: Nodes of a graph that are followed.
_MOST_NODES = 20_000


def has_node(tensor: torch.Tensor, sequences: frozenset[int]) -> bool:
    """Whether a tensor's autograd graph contains a node with one of some sequence numbers.

    A node has a higher number than those that it leads to. The lowest that may still lead there is followed first: of
    a loss summed over steps, that is the sum of the step before.

    Args:
        tensor: A tensor with a ``grad_fn``.
        sequences: The numbers.
    """
    root = tensor.grad_fn
    if root is None or not sequences:
        return False
    lowest, seen = min(sequences), {root._sequence_nr()}
    waiting = [(root._sequence_nr(), 0, root)]
    for count in range(_MOST_NODES):
        if not waiting:
            break
        number, _, node = heapq.heappop(waiting)
        if number in sequences:
            return True
        for place, (following, _) in enumerate(node.next_functions):
            if following is None:
                continue
            number = following._sequence_nr()
            if number >= lowest and number not in seen:
                seen.add(number)
                heapq.heappush(waiting, (number, count * len(node.next_functions) + place, following))
    return False


def graph_holders(
    lines: Iterable[tuple[_Line, frozenset[int]]], computed: list[torch.Tensor]
) -> dict[_Line, torch.Tensor]:
    """Returns, for lines whose tensors only a graph holds, a tensor that this graph belongs to.

    Args:
        lines: Each line and the sequence numbers of the nodes of its operators.
        computed: Tensors with a graph.
    """
    found = {}
    for line, sequences in lines:
        tensor = next((tensor for tensor in computed if has_node(tensor, sequences)), None)
        if tensor is not None:
            found[line] = tensor
    return found
