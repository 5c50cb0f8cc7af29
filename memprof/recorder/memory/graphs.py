"""Finds the tensor whose autograd graph holds memory: the nodes of the operators that made it are in that graph."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch

_Line = TypeVar("_Line")
#: Nodes of one graph that are followed.
_MOST_NODES = 5_000
#: The same of all graphs that are searched together.
_MOST_NODES_OF_ALL = 15_000
#: Nodes that accumulate gradients all have the largest number.
_ACCUMULATE = 2**63


def graph_holders(lines: Mapping[_Line, frozenset[int]], computed: list[torch.Tensor]) -> dict[_Line, torch.Tensor]:
    """Returns, for lines whose tensors only a graph holds, a tensor that this graph belongs to.

    Args:
        lines: The sequence numbers of the autograd nodes of each line's operators.
        computed: Tensors with a graph. Of several graphs that hold a line's tensors, the smallest counts: that of a
            state that carries its history, not that of a loss computed from it.
    """
    owner = {number: line for line, numbers in lines.items() for number in numbers}
    graphs: list[tuple[list[int], torch.Tensor]] = []
    left = _MOST_NODES_OF_ALL
    for tensor in computed if owner else ():
        numbers = list(_nodes(tensor, min(owner)))
        graphs.append((numbers, tensor))
        left -= len(numbers)
        if left <= 0:
            break
    found: dict[_Line, torch.Tensor] = {}
    for numbers, tensor in sorted(graphs, key=lambda one: len(one[0])):
        for number in numbers:
            if number in owner:
                found.setdefault(owner[number], tensor)
    return found


def graphs_over_steps(
    computed: list[torch.Tensor], first: int, step_began_at: int
) -> list[tuple[list[int], torch.Tensor]]:
    """Returns the graphs that reach back beyond the last step, each with its tensor, the smallest graph first.

    A hidden state that carries its history into the next step's loss has a smaller graph than this loss.

    Args:
        computed: Tensors with a graph.
        first: Sequence number of the first node that counts.
        step_began_at: That of the first node of the last step.

    Returns:
        The sequence numbers of the nodes, and the tensor.
    """
    found = []
    for tensor in computed:
        numbers = [number for number in _nodes(tensor, first) if first <= number < _ACCUMULATE]
        if numbers and min(numbers) < step_began_at:
            found.append((sorted(numbers), tensor))
    return sorted(found, key=lambda one: len(one[0]))


def _nodes(tensor: torch.Tensor, lowest: int) -> Iterator[int]:
    """Yields the sequence numbers of the nodes of a tensor's graph, none below the lowest.

    A node has a higher number than those that it leads to. The lowest that is known is followed first: of a loss summed
    over steps, that is the sum of the step before.
    """
    try:
        root = tensor.grad_fn
    except RuntimeError:  # one of several views whose base was written to, such as FSDP's of a flat parameter
        return
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
