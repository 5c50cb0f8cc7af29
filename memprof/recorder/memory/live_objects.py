"""Finds the live objects of a type while other threads of the job run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import chain, compress, repeat
from typing import Any

import torch
from torch.optim import Optimizer

_has_frozen = False


def freeze_imports() -> None:
    """Leaves all objects so far out of garbage collections and of searches for live objects.

    Of the 300,000 objects that are made while torch is imported, none is a tensor, a module or an optimizer; searches
    for these took a tenth of the time of a short dry run. If there is a tensor, nothing is left out.
    """
    global _has_frozen  # noqa: PLW0603 - one garbage collector per process
    gc.collect()
    if not live_objects(torch.Tensor):
        gc.freeze()
        _has_frozen = True


def find_referrers(objects: Sequence[Any]) -> list[Any]:
    """Returns the objects that refer directly to some others, such as the dictionary of the script's variables.

    What `freeze_imports` left out is searched from now on.

    Args:
        objects: The others.
    """
    global _has_frozen  # noqa: PLW0603 - one garbage collector per process
    if _has_frozen:
        gc.unfreeze()
        _has_frozen = False
    return gc.get_referrers(*objects)


def live_optimizers(*, is_late: bool) -> list[Any]:
    """Lists the optimizers alive when a recording begins.

    Args:
        is_late: Whether the process ran before, as in a notebook. Optimizers of earlier cells that only reference
            cycles keep alive are collected first: a step would wait for their updates.
    """
    found = live_objects(Optimizer)
    if is_late and len(found) > 1:
        del found  # which would keep them alive
        gc.collect()
        found = live_objects(Optimizer)
    return found


def live_objects(kind: type) -> list[Any]:
    """Lists the objects of a type (or a subclass) tracked by the garbage collector, oldest first.

    The collector keeps its objects in the order of their creation, in each of its generations; the oldest is read
    first. A collection in between would move objects into a generation that has been read.

    Checks the type, never `__class__`: lazy proxies load the object they stand for when it is read.

    Nothing in the search is Python code, so that no other thread runs while all objects are referenced: some may be
    tuples still being filled from a generator, for which Python raises SystemError if anything else references them.
    """
    generations = reversed(range(len(gc.get_count())))
    objects = chain.from_iterable(map(gc.get_objects, generations))
    twice = chain.from_iterable(map(repeat, objects, repeat(2)))  # one to keep, one to test
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(compress(twice, map(issubclass, map(type, twice), repeat(kind))))
    finally:
        if collects:
            gc.enable()


def outermost_modules() -> list[torch.nn.Module]:
    """Lists the live modules that no other module contains."""
    modules = [module for module in live_objects(torch.nn.Module) if "_modules" in module.__dict__]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    return [module for module in modules if id(module) not in inner]
