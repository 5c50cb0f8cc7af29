"""What holds memory without a variable: autograd's graph, and objects that only refer to each other."""

from __future__ import annotations

import gc
import heapq
import sys
import types
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

_Line = TypeVar("_Line")
#: Nodes of one graph that are followed.
_MOST_NODES = 5_000
#: The same of all graphs that are searched together.
_MOST_NODES_OF_ALL = 15_000
#: Nodes that accumulate gradients all have the largest number.
_ACCUMULATE = 2**63
#: Objects after whose type a cycle is not named if others are in it.
_UNNAMED = (torch.Tensor, dict, list, tuple, set, deque, types.CellType, types.MethodType, types.FunctionType)


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


def cycle_above(tensor: torch.Tensor, above: Mapping[int, Any], counted: Mapping[int, int]) -> Any:
    """Returns the object of a reference cycle that is nearest to a tensor it alone keeps alive, else None.

    As the collector does, it compares the number of references to each object with those that the others have to it.

    Args:
        tensor: The tensor.
        above: All objects that lead to the tensor, by identity.
        counted: References that the caller has to each of them, in addition to `above`.
    """
    objects = {**above, id(tensor): tensor}
    below = {number: [id(one) for one in gc.get_referents(each)] for number, each in objects.items()}
    references = Counter(child for children in below.values() for child in children if child in objects)
    inside = {number: objects.keys() & set(children) for number, children in below.items()}
    parents: dict[int, set[int]] = {number: set() for number in objects}
    for number, children in inside.items():
        for child in children:
            parents[child].add(number)
    # Of tensors, only references that the collector sees count: torch and the caller have others.
    if not all(parents.values()) or any(
        # Those of `above`, of `objects`, and of the call.
        sys.getrefcount(above[number]) > references[number] + counted.get(number, 0) + 3
        for number in above
        if not issubclass(type(above[number]), torch.Tensor)
    ):
        return None
    rest = dict(parents)
    while ends := [number for number in rest if not rest.keys() & inside[number]]:
        for number in ends:
            del rest[number]
    nearest = [id(tensor)]
    for number in nearest:  # grows while it is read: the nearest first
        nearest += [one for one in parents[number] if one not in nearest]
    cycle = [objects[number] for number in nearest if number in rest]
    named = (one for one in cycle if not issubclass(type(one), _UNNAMED))
    return next(named, cycle[0] if cycle else None)
