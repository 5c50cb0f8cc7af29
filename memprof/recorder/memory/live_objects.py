"""Finds the objects of a type that are alive, while other threads of the job run."""

from __future__ import annotations

import gc
from itertools import chain, compress, repeat
from typing import Any

from torch.optim import Optimizer


def live_optimizers(*, is_late: bool) -> list[Any]:
    """Lists the optimizers alive where a recording begins.

    Args:
        is_late: Whether the process was at work before, as in a notebook. Optimizers of earlier cells that nobody
            holds any more, but for reference cycles, are collected first: a step would wait for their updates.
    """
    if is_late and len(live_objects(Optimizer)) > 1:
        gc.collect()
    return live_objects(Optimizer)


def live_objects(kind: type) -> list[Any]:
    """Lists the objects of a type (or a subclass) that the garbage collector knows.

    Asks for the type, never for `__class__`: lazy proxies answer that by loading what they stand for.

    Nothing in here is Python code, so that no other thread runs while all objects are held: some of them may be tuples
    that are still being filled from a generator, and Python ends that with a SystemError where anybody else holds them.
    """
    objects = chain.from_iterable(map(gc.get_objects, (None,)))  # asked for with the first
    twice = chain.from_iterable(map(repeat, objects, repeat(2)))  # once to be kept, once to be looked at
    return list(compress(twice, map(issubclass, map(type, twice), repeat(kind))))
