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
    """Lists the objects of a type (or a subclass) tracked by the garbage collector.

    Checks the type, never `__class__`: lazy proxies load the object they stand for when it is read.

    Nothing in here is Python code, so that no other thread runs while all objects are referenced: some may be tuples
    still being filled from a generator, for which Python raises SystemError if anything else references them.
    """
    objects = chain.from_iterable(map(gc.get_objects, (None,)))  # called on the first item
    twice = chain.from_iterable(map(repeat, objects, repeat(2)))  # one to keep, one to test
    return list(compress(twice, map(issubclass, map(type, twice), repeat(kind))))
