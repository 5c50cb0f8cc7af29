"""Recognizes objects that nothing but references among themselves keeps alive, until Python's collector runs."""

from __future__ import annotations

import gc
import sys
import types
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import torch

#: Objects after whose type a cycle is not named if others are in it.
_UNNAMED = (torch.Tensor, dict, list, tuple, set, deque, types.CellType, types.MethodType, types.FunctionType)


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
