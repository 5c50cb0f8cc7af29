"""Placement of storages: the allocator's addresses where recorded, else packed by first fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from memprof.replay.history import Ids
from memprof.trace.schema import NONE, AllocatorEvents, Bools, Ints, Storages
from memprof.trace.store import Trace

#: Events that end an allocation; a device allocator emits two, and the first counts.
_ENDS = ("free", "free_requested", "free_completed")

#: Approximate number of storages matched at a time.
_MOST_MATCHED = 250_000


def addresses_of(trace: Trace) -> Ints:
    """Finds the address of each storage among the allocator's events.

    Storages carry none themselves. The events are paired to lives, and a storage is the life that begins and ends with
    the same operators and has its size; the k-th such storage is the k-th such life, as both are in order of birth.
    What is left over (a life of two allocations, one that began before the recording) is found by its beginning or by
    its end alone.

    Returns:
        Addresses, ``NONE`` where unknown, shape ``(storages,)``.

    Raises:
        BadInputError: The recording is damaged.
    """
    storages = trace.columns(Storages, "requested_bytes", "allocated_bytes", "created_op_id", "freed_op_id")
    created, freed = (storages[name].astype(np.int32) for name in ("created_op_id", "freed_op_id"))
    size: Ints = storages["requested_bytes"]
    address = np.full(len(size), NONE, dtype=np.int64)
    lives = _lives(trace)
    if not len(lives.address):
        return address
    is_open = storages["allocated_bytes"] > 0
    del storages
    is_free = np.ones(len(lives.address), dtype=np.bool_)
    for by_birth, by_death in ((True, True), (True, False), (False, True)):
        rows = np.flatnonzero(is_open & (by_death | (created != NONE)) & (by_birth | (freed != NONE)))
        places = np.flatnonzero(is_free & (by_death | (lives.born != NONE)) & (by_birth | (lives.died != NONE)))
        first, second = (created, freed) if by_birth else (freed, created)
        first_there, second_there = (lives.born, lives.died) if by_birth else (lives.died, lives.born)
        for some, others in _parts(rows, first, places, first_there):
            both = by_birth and by_death
            wanted = [size[some], first[some], *([second[some]] if both else [])]
            there = [lives.size[others], first_there[others], *([second_there[others]] if both else [])]
            found, life = _match(wanted, there)
            address[some[found]] = lives.address[others[life]]
            is_open[some[found]] = False
            is_free[others[life]] = False
    return address


def _parts(rows: Ints, op_ids: Ids, places: Ints, others: Ids) -> Iterator[tuple[Ints, Ints]]:
    """Cuts what is matched into parts of neighbouring operators, so that little memory is needed at a time."""
    rows = rows[np.argsort(op_ids[rows], kind="stable")]
    places = places[np.argsort(others[places], kind="stable")]
    edges = op_ids[rows[_MOST_MATCHED::_MOST_MATCHED]]
    return zip(
        np.split(rows, np.searchsorted(op_ids[rows], edges)),
        np.split(places, np.searchsorted(others[places], edges)),
        strict=True,
    )


@dataclass(frozen=True, eq=False)
class _Lives:
    """Allocations: the operators they begin and end with, ``NONE`` for outside of the recording."""

    born: Ids
    died: Ids
    size: Ints
    address: Ints


def _lives(trace: Trace) -> _Lives:
    """Pairs allocations and frees of the same address, in order of birth; reads one column at a time."""
    action = trace.columns(AllocatorEvents, "action")["action"]
    is_alloc = (action.distinct == "alloc")[action.codes]
    kept = np.flatnonzero(is_alloc | np.isin(action.distinct.astype(str), _ENDS)[action.codes]).astype(np.int32)
    del action
    address = trace.columns(AllocatorEvents, "address")["address"]
    order = kept[np.argsort(address[kept], kind="stable")]
    ordered = address[order]
    is_same = np.append(ordered[1:] == ordered[:-1], False)[: len(order)]
    del kept, ordered
    is_birth = is_alloc[order]
    ends_next = is_birth & is_same & ~np.append(is_birth[1:], True)[: len(order)]
    # A free without a preceding allocation ends a block allocated before recording.
    is_old = ~is_birth & ~np.concatenate(([False], is_same[:-1]))[: len(order)]
    rows = np.flatnonzero(is_birth | is_old)
    rows = rows[np.argsort(order[rows], kind="stable")]
    address = address[order[rows]]
    op_id = trace.columns(AllocatorEvents, "op_id")["op_id"].astype(np.int32)[order]
    after = np.append(op_id[1:], np.int32(NONE))[: len(order)]
    return _Lives(
        born=np.where(is_old[rows], np.int32(NONE), op_id[rows]),
        died=np.where(is_old[rows], op_id[rows], np.where(ends_next[rows], after[rows], np.int32(NONE))),
        size=trace.columns(AllocatorEvents, "size_bytes")["size_bytes"][order[rows]],
        address=address,
    )


def _match(wanted: list[Any], there: list[Any]) -> tuple[Ints, Ints]:
    """Joins rows of equal keys, the k-th of one side with the k-th of the other.

    Returns:
        The rows of each side that belong together.
    """
    count = len(wanted[0])
    columns = [np.concatenate(pair) for pair in zip(wanted, there, strict=True)]
    is_there = np.arange(len(columns[0])) >= count
    order = np.lexsort((is_there, *columns))
    if not len(order):
        return order, order
    is_new = np.concatenate(([True], np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)))
    side = is_there[order]
    starts_run = is_new | np.concatenate(([True], side[1:] != side[:-1]))
    runs = np.flatnonzero(starts_run)
    place = np.arange(len(order)) - np.repeat(runs, np.diff(np.append(runs, len(order))))
    key = np.cumsum(is_new) * (len(order) + 1) + place
    _, one, other = np.intersect1d(key[~side], key[side], assume_unique=True, return_indices=True)
    return order[~side][one], order[side][other] - count


@dataclass(frozen=True, eq=False)
class Compressed:
    """Addresses without the huge gaps between them.

    Attributes:
        y: Where each begins, counted from the lowest, shape as the addresses.
        top: Where the highest ends.
        cut_bytes: Gaps of more bytes than this were cut out.
        cuts: How many were.
    """

    y: Ints
    top: int
    cut_bytes: int
    cuts: int


def compress(address: Ints, size: Ints) -> Compressed:
    """Removes gaps larger than 1/20 of the covered bytes. Smaller ones stay: they are holes.

    Args:
        address: Where blocks begin, ascending.
        size: Their bytes.
    """
    if not len(address):
        return Compressed(address, 0, 0, 0)
    reached = np.maximum.accumulate(address + size)
    gap = np.concatenate(([0], np.maximum(address[1:] - reached[:-1], 0)))
    covered = int(reached[-1] - address[0] - gap.sum())
    huge = max(covered // 20, 1)
    cut = np.where(gap > huge, gap - huge // 4, 0)
    y = address - address[0] - np.cumsum(cut)
    return Compressed(y, int((y + size).max()), huge, int(np.count_nonzero(cut)))


def first_fit(left: Ids | Ints, right: Ids | Ints, size: Ints) -> Ints:
    """Packs blocks by first fit: each, in order of birth, at the lowest offset that is free for its lifetime.

    Args:
        left: When each is born, shape ``(blocks,)``.
        right: When its place is free again.
        size: Its bytes.

    Returns:
        Where each begins, shape ``(blocks,)``.
    """
    y = np.zeros(len(size), dtype=np.int64)
    low = np.empty(0, dtype=np.int64)  # of those that are alive, ascending
    high, ends = low, low
    for block in np.lexsort((-size, left)).tolist():
        if len(ends) and ends.min() <= left[block]:
            is_alive: Bools = ends > left[block]
            low, high, ends = low[is_alive], high[is_alive], ends[is_alive]
        floors = np.concatenate(([0], high))
        fits = np.append(low, np.iinfo(np.int64).max) - floors >= size[block]
        place = int(fits.argmax())
        y[block] = floors[place]
        low = np.insert(low, place, y[block])
        high = np.insert(high, place, y[block] + size[block])
        ends = np.insert(ends, place, right[block])
    return y
