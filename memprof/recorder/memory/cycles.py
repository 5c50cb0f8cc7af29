"""Recognizes objects that nothing but references among themselves keeps alive, until Python's collector runs."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

#: Objects after whose type a cycle is not named if others are in it.
_UNNAMED = (torch.Tensor, dict, list, tuple, set, deque, types.CellType, types.MethodType, types.FunctionType)


def cycle_above(tensor: torch.Tensor, above: Mapping[int, Any]) -> Any:
    """Returns the object of a reference cycle that is nearest to a tensor it alone keeps alive, else None.

    Args:
        tensor: The tensor.
        above: All objects that lead to the tensor, by identity.
    """
    objects = {**above, id(tensor): tensor}
    children = {number: {id(one) for one in gc.get_referents(each)} & objects.keys() for number, each in objects.items()}
    parents: dict[int, set[int]] = {number: set() for number in objects}
    for number, below in children.items():
        for child in below - {number}:
            parents[child].add(number)
    if not all(parents.values()):
        return None  # something that the collector does not see refers to one of them
    rest = dict(parents)
    while ends := [number for number in rest if not children[number] & rest.keys() - {number}]:
        for number in ends:
            del rest[number]
    nearest = [id(tensor)]
    for number in nearest:  # grows while it is read: the nearest first
        nearest += [one for one in parents[number] if one not in nearest]
    cycle = [objects[number] for number in nearest if number in rest]
    named = (one for one in cycle if not issubclass(type(one), _UNNAMED))
    return next(named, cycle[0] if cycle else None)
