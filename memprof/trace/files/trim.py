"""Drops the warm-up from a recording that contains a complete recorded step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

import numpy as np

from memprof.trace.schema import (
    NONE,
    AllocatorEvents,
    Bools,
    Holders,
    Ints,
    Memory,
    ModuleCalls,
    Ops,
    OutOfMemory,
    Saved,
    Steps,
    Storages,
    Table,
    Uses,
)

T = TypeVar("T", bound=Table)
Tables = dict[type[Table], Table]


def drop_warm_up(tables: Mapping[type[Table], Table]) -> Tables:
    """Removes the operators before the first recorded step, and everything that concerns only them.

    The warm-up is recorded in case the job ends within it. Once a recorded step is complete it only takes space.
    Storages created in the warm-up that live on become storages alive before the recording, so replaying the steps
    that are kept gives the same bytes. Operators, storages and module calls are renumbered without gaps; rows
    of ``steps`` stay, those of the warm-up without operators.

    Returns:
        The tables without the warm-up, or unchanged if no recorded step is complete.
    """
    kept = dict(tables)
    steps = _table(kept, Steps)
    recorded = (steps.kind == "recorded") & (steps.first_op_id != NONE)
    if not np.any(recorded & steps.is_complete):
        return kept
    first_op_id = int(steps.first_op_id[recorded].min())
    kept[Steps] = steps.replace(
        first_op_id=_moved(steps.first_op_id, first_op_id), last_op_id=_moved(steps.last_op_id, first_op_id)
    )

    storages = _table(kept, Storages)
    lives_on = (storages.freed_op_id == NONE) | (storages.freed_op_id >= first_op_id)
    storage_ids = _new_ids(storages.storage_id, lives_on)
    storages = storages.take(lives_on)
    kept[Storages] = storages.replace(
        storage_id=np.arange(len(storages)),
        created_op_id=_moved(storages.created_op_id, first_op_id),
        freed_op_id=_moved(storages.freed_op_id, first_op_id),
        held_op_id=_moved(storages.held_op_id, first_op_id),
    )

    holders = _table(kept, Holders)
    kept[Holders] = holders.replace(storage_id=_renamed(holders.storage_id, storage_ids))

    ops = _table(kept, Ops)
    ops = ops.take(ops.op_id >= first_op_id)
    kept[Ops] = ops.replace(op_id=ops.op_id - first_op_id, forward_op_id=_moved(ops.forward_op_id, first_op_id))

    uses = _table(kept, Uses)
    uses = uses.take(uses.op_id >= first_op_id)
    kept[Uses] = uses.replace(op_id=uses.op_id - first_op_id, storage_id=_renamed(uses.storage_id, storage_ids))

    saved = _table(kept, Saved)
    saved = saved.take(saved.forward_op_id >= first_op_id)
    kept[Saved] = saved.replace(
        storage_id=_renamed(saved.storage_id, storage_ids),
        forward_op_id=saved.forward_op_id - first_op_id,
        released_op_id=_moved(saved.released_op_id, first_op_id),
    )

    memory = _table(kept, Memory)
    memory = memory.take(memory.op_id >= first_op_id)
    kept[Memory] = memory.replace(op_id=memory.op_id - first_op_id)

    events = _table(kept, AllocatorEvents)
    kept[AllocatorEvents] = _events_from(events, first_op_id)

    failures = _table(kept, OutOfMemory)
    kept[OutOfMemory] = failures.replace(op_id=_moved(failures.op_id, first_op_id))

    calls = _table(kept, ModuleCalls)
    is_kept = calls.step >= int(steps.step[recorded].min())
    call_ids = _new_ids(calls.module_call_id, is_kept)
    calls = calls.take(is_kept)
    kept[ModuleCalls] = calls.replace(
        module_call_id=np.arange(len(calls)),
        parent_call_id=_renamed(calls.parent_call_id, call_ids),
        first_op_id=_moved(calls.first_op_id, first_op_id),
        last_op_id=_moved(calls.last_op_id, first_op_id),
    )
    return kept


def _events_from(events: AllocatorEvents, first_op_id: int) -> AllocatorEvents:
    """Drops the events before an operator; where initial blocks are listed, the list is updated to that operator."""
    later = events.take(events.op_id >= first_op_id)
    later = later.replace(op_id=later.op_id - first_op_id)
    if not (events.index == NONE).any():
        return later
    before = events.take(events.op_id < first_op_id)
    is_about_block = np.isin(before.action, ("alloc", "free", "free_completed"))
    before = before.take(is_about_block)
    latest = len(before) - 1 - np.unique(before.address[::-1], return_index=True)[1]
    in_use = before.take(np.sort(latest[before.action[latest] == "alloc"]))
    nothing = np.full(len(in_use), NONE, dtype=np.int64)
    in_use = in_use.replace(index=nothing, op_id=nothing, time_us=np.full(len(in_use), np.nan))
    return AllocatorEvents.joined((in_use, later))


def _table(tables: Mapping[type[Table], Table], kind: type[T]) -> T:
    return cast(T, tables[kind]) if kind in tables else kind.empty()


def _moved(op_ids: Ints, first_op_id: int) -> Ints:
    """Renumbers operators from ``first_op_id`` on; those before it become NONE."""
    return np.where(op_ids >= first_op_id, op_ids - first_op_id, NONE)


def _new_ids(ids: Ints, is_kept: Bools) -> Ints:
    """Returns the new id of each old one, NONE for dropped ones; shape ``(highest id + 1,)``."""
    new_ids = np.full(int(ids.max(initial=NONE)) + 1, NONE, dtype=np.int64)
    new_ids[ids[is_kept]] = np.arange(int(is_kept.sum()))
    return new_ids


def _renamed(ids: Ints, new_ids: Ints) -> Ints:
    """Returns the new ids; NONE (-1) maps to the appended entry."""
    renamed: Ints = np.append(new_ids, NONE)[ids]
    return renamed
