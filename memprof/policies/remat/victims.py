"""The contents of a job as eviction candidates: what each costs, and whether copying out is faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from memprof.policies.evict.victims import Facts, Victims
from memprof.policies.remat.cells import Cell, Recipe
from memprof.policies.swap.moves import Carrier

_use_count = torch._C._storage_Use_Count


def cell_victims(heuristic: str) -> Victims[Cell]:
    """Returns the eviction candidates, none yet: cells that autograd saved, in memory and not held by anything else.

    Args:
        heuristic: A name in ``HEURISTICS``.
    """
    facts = Facts(
        own_us=_own_us,
        sources=_sources,
        dependants=_dependants,
        is_gone=_is_gone,
        may_go=may_go,
        size_bytes=attrgetter("size_bytes"),
        used_us=attrgetter("used_us"),
    )
    return Victims(facts, heuristic, WeakKeyDictionary())


def may_go(cell: Cell) -> bool:
    """Returns whether dropping a cell would free its memory and its content could be restored."""
    hold = cell.hold
    return (
        hold is not None
        and not cell.locks
        and not cell.is_kept
        and cell.recipe is not None
        and cell.recipe.can_repeat
        and cell.size_bytes > 0
        and _use_count(hold._cdata) == 1 + cell.views
        and not cell.is_lent()
    )


def settle(victims: Victims[Cell], cell: Cell) -> bool:
    """Removes all dependence on an input; returns False if a content computed from it is dropped."""
    dependants: list[Recipe] = []
    there: list[tuple[Cell, torch.UntypedStorage]] = []
    pending, seen = [cell], set()
    while pending:
        for recipe in pending.pop().live_readers():
            if id(recipe) in seen:
                continue
            seen.add(id(recipe))
            dependants.append(recipe)
            for output in recipe.outputs:
                made = output()
                if made is None:
                    continue
                storage = made.storage()
                if storage is not None:
                    there.append((made, storage))
                elif made.saved:
                    return False
                else:
                    pending.append(made)
    for recipe in dependants:
        recipe.can_repeat = False
        recipe.anchors = ()
    for made, storage in there:  # from now on these cannot be recomputed
        made.recipe = None
        victims.remove(made)
        for recipe in made.live_readers():
            recipe.anchors += (storage,)
    return True


def settle_input(victims: Victims[Cell], cells: Iterable[Cell]) -> bool:
    """Releases one input that only recipes hold and whose results are all in memory; these then cannot be dropped.

    Returns:
        Whether there was one.
    """
    for cell in list(cells):
        storage = cell.storage()
        if cell.recipe is not None or storage is None or cell.saved or not cell.size_bytes or not cell.readers:
            continue
        if _use_count(storage._cdata) == 1 and settle(victims, cell):
            return True
    return False


def _is_gone(cell: Cell) -> bool:
    """Returns whether a cell would have to be recomputed for a reader; one moved out would be copied back."""
    return cell.recipe is not None and cell.place is None and not cell.is_there()


def _own_us(cell: Cell) -> float:
    """Returns the time of a cell's operators: the last one, and those whose result it changed in place.

    Operators count with the least time of their kind, which excludes interference.
    """
    recipe = cell.recipe
    total_us = 0.0
    while recipe is not None:
        total_us += recipe.need.least_us
        before = recipe.changes
        recipe = before.recipe if before is not None and not before.is_there() else None
    return total_us


def _sources(cell: Cell) -> Iterator[Cell]:
    """Yields the cells a cell is computed from; earlier contents of its storage count as its own."""
    recipe = cell.recipe
    for made_from in recipe.inputs if recipe is not None else ():
        if recipe is not None and recipe.changes is made_from and not made_from.is_there():
            yield from _sources(made_from)
        else:
            yield made_from


def _dependants(cell: Cell) -> Iterator[Cell]:
    """Yields the cells computed from a cell, each as its storage's latest content."""
    for recipe in cell.live_readers():
        for output in recipe.outputs:
            made = output()
            while made is not None and not made.is_there() and (later := _changed_to(made)) is not None:
                made = later
            if made is not None:
                yield made


def _changed_to(cell: Cell) -> Cell | None:
    """Returns the result of an in-place operator on a cell, None if there is none."""
    for recipe in cell.live_readers():
        if recipe.changes is cell:
            return recipe.outputs[0]() if recipe.outputs else None
    return None


class Swapping:
    """A carrier and its speed."""

    def __init__(self, carrier: Carrier, bytes_per_us: float) -> None:
        self._carrier = carrier
        self._bytes_per_us = bytes_per_us

    def carry_out(self, storage: torch.UntypedStorage, recompute_us: float) -> Any:
        """Copies a storage's bytes out and returns the place; None if recomputing is faster or the copy failed."""
        if 2 * storage.nbytes() / self._bytes_per_us >= recompute_us:
            return None
        place = self._carrier.send(storage)
        if self._carrier.sent(place):
            return place
        self._carrier.forget(place, storage)
        return None

    def carry_back(self, place: Any) -> torch.UntypedStorage:
        """Returns a storage with the bytes."""
        storage = self._carrier.fetch(place)
        self._carrier.fetched(place)
        return storage

    def forget(self, place: Any) -> None:
        """Frees the place."""
        self._carrier.forget(place, None)
