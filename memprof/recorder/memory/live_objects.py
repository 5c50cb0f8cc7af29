"""Finds the live objects of a type while other threads of the job run."""

from __future__ import annotations

import gc
from itertools import chain, compress, repeat
from typing import Any

from torch.optim import Optimizer


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
