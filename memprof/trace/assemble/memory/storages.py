"""Builds the storage and use tables of a recording, and replays the allocator's counter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.assemble.device_events import active_peaks, requested_bytes, reserved_peaks
from memprof.trace.assemble.memory.block_lives import BlockLives, Counter, count, pair
from memprof.trace.assemble.memory.categories import Facts, Lifetimes, categorize
from memprof.trace.assemble.memory.elsewhere import (
    Elsewhere,
    Foreign,
    account,
    end_buffers_of_collectives,
    end_missed_frees,
    find_foreign,
    name_workspaces,
    reused_ends,
)
from memprof.trace.assemble.memory.holders import holder_records
from memprof.trace.assemble.memory.native_events import CPU
from memprof.trace.assemble.memory.touches import Touches, find_touches, in_place_sums, merge_lives, wrapped_twice
from memprof.trace.assemble.recording import Recording
from memprof.trace.assemble.timeline import NEVER
from memprof.trace.assemble.times import Partners
from memprof.trace.files.spool import FLAG_COLLECTIVE, WRITE
from memprof.trace.schema import (
    ELSEWHERE,
    NONE,
    ROLES,
    Ints,
    Memory,
    Modules,
    Ops,
    Storages,
    Texts,
    Uses,
)


@dataclass(frozen=True)
class MemoryTables:
    """The memory tables of a recording.

    Attributes:
        storages: Lives of storages.
        uses: Which operator uses which storage.
        counter: The allocator's counter.
        held: Storage of each statement on what holds a tensor; NONE where not recorded.
        notes: Caveats for the reader.
    """

    storages: Storages
    uses: Uses
    counter: Counter
    held: Ints
    notes: tuple[str, ...]


def memory_tables(recording: Recording, modules: Modules, ops: Ops, partners: dict[int, Partners]) -> MemoryTables:
    """Builds the storage and use tables."""
    timeline = recording.timeline
    memory_events = recording.memory_events
    lives, elsewhere = _known_and_unknown(recording)
    touches = find_touches(recording, lives)
    # Of each row's own operator; for memory between operators, the start of the row.
    start_ns = np.where(recording.is_real, recording.raw["start_ns"][recording.before], timeline.start_ns)
    is_repeated = wrapped_twice(timeline, lives, start_ns)
    lives, become, is_void = merge_lives(timeline, lives, in_place_sums(recording, lives, touches, partners))
    is_void[lives.born[is_repeated]] = True
    is_void[lives.died[is_repeated]] = True
    start_bytes = int(lives.size_bytes[lives.born == NONE].sum()) + elsewhere.start_bytes
    counter = count(timeline, lives, start_bytes, is_void, elsewhere.change, elsewhere.relief)

    # Storages: lives longer than one operator, then foreign memory, then memory allocated elsewhere.
    event_op = timeline.event_op
    born = np.full(len(lives.born), NONE, dtype=np.int64)
    died = np.full(len(lives.born), NONE, dtype=np.int64)
    born[lives.born != NONE] = event_op[lives.born[lives.born != NONE]]
    has_died = lives.died != NEVER
    died[has_died] = event_op[lives.died[has_died]]
    is_merged = become != np.arange(len(become))
    is_short = counter.is_temporary | is_repeated
    kept = np.flatnonzero(~is_short & ~is_merged & ~(has_died & (died == NONE)))
    storage_of_life = np.full(len(lives.born) + 1, NONE, dtype=np.int64)
    storage_of_life[kept] = np.arange(len(kept))
    storage_of_life[:-1] = storage_of_life[become]

    storage = storage_of_life[touches.life]
    is_temporary = np.append(is_short, False)[touches.life]
    foreign = find_foreign(
        touches.raw_op,
        touches.address,
        touches.size_bytes,
        touches.role == WRITE,
        (storage == NONE) & ~is_temporary,
        len(kept),
    )
    storage = np.where(storage == NONE, foreign.storage, storage)
    facts = _facts(recording, lives, storage_of_life, foreign)

    sizes = lives.size_bytes[kept]
    created = np.concatenate([born[kept], recording.rows_of(foreign.first), elsewhere.created])
    freed = np.concatenate([died[kept], recording.rows_of(foreign.last), elsewhere.freed])
    reported = requested_bytes(memory_events, lives)[kept]
    requested = np.concatenate([np.where(reported == NONE, sizes, reported), foreign.size_bytes, elsewhere.size_bytes])
    allocated = np.concatenate([sizes, np.zeros_like(foreign.size_bytes), elsewhere.size_bytes])

    uses = _unique_uses(recording.row_of_raw[touches.raw_op], storage, touches.role)
    lifetimes = Lifetimes.of(created, freed, uses, ops)
    category = categorize(facts, lifetimes)
    tensor, module, name = _attributes(facts, touches, storage, created, ops)
    names = texts.look_up(recording.names, name)
    is_elsewhere = np.arange(len(created)) >= len(kept) + len(foreign.size_bytes)
    names[is_elsewhere] = ELSEWHERE
    category[is_elsewhere] = "unknown"
    module[is_elsewhere] = NONE
    is_own = np.arange(len(created)) < len(kept)
    device = texts.look_up(recording.tensors.device, tensor)
    device[is_own | is_elsewhere | (device == "")] = memory_events.device
    if memory_events.device != CPU:
        name_workspaces(is_own, category, names, requested, created, freed, uses.storage_id, ops)
    order = np.argsort(created, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    storages = Storages.of(
        storage_id=np.arange(len(order)),
        category=category[order],
        name=_qualified(names, category, module, modules)[order],
        module_id=module[order],
        device=device[order],
        requested_bytes=requested[order],
        allocated_bytes=allocated[order],
        created_op_id=created[order],
        freed_op_id=freed[order],
        shape=texts.look_up(recording.tensors.shape, tensor)[order],
        dtype=texts.look_up(recording.tensors.dtype, tensor)[order],
    )
    held = _held(recording, lives, storage_of_life, foreign)
    return MemoryTables(
        storages=storages,
        uses=uses.replace(storage_id=place[uses.storage_id]),
        counter=counter,
        held=np.append(place, NONE)[held],
        notes=_notes(elsewhere, recording.memory_events.lost),
    )


def workspace_bytes(storages: Storages, counter: Counter) -> Ints:
    """Returns the bytes each row held beyond what was alive before it and its own outputs. Shape (rows,)."""
    born = np.zeros(len(counter.peak), dtype=np.int64)
    is_made = storages.created_op_id != NONE
    np.add.at(born, storages.created_op_id[is_made], storages.allocated_bytes[is_made])
    return counter.peak - counter.before - born


def memory_samples(recording: Recording, counter: Counter) -> Memory:
    """Builds the table of counters."""
    samples = recording.in_epoch("rss")
    raw = samples["op"] - recording.epoch.first_op
    is_inside = (raw >= 0) & (raw < recording.raw_count)
    rss = np.full(recording.rows, NONE, dtype=np.int64)
    rss[recording.row_of_raw[raw[is_inside]]] = samples["rss_bytes"][is_inside]
    return Memory.of(
        op_id=np.arange(recording.rows),
        time_us=recording.timeline.start_ns / 1000,
        device=np.full(recording.rows, recording.memory_events.device, dtype=np.object_),
        allocated_bytes=counter.peak,
        active_bytes=active_peaks(recording.memory_events, recording.timeline, counter.peak),
        reserved_bytes=reserved_peaks(recording.memory_events, recording.timeline),
        host_rss_bytes=rss,
    )


def _known_and_unknown(recording: Recording) -> tuple[BlockLives, Elsewhere]:
    """Returns the lives of blocks, and the memory that the allocator counts in addition."""
    timeline, events = recording.timeline, recording.memory_events
    lives = pair(timeline, events.alive_address, events.alive_bytes)
    if _has_totals(recording):
        lives = end_missed_frees(timeline, lives, events.total)
        return lives, account(timeline, lives, events.total)
    is_collective = (recording.raw["flags"] & FLAG_COLLECTIVE) != 0
    if recording.epoch.source == "native" and is_collective.any():
        touches = find_touches(recording, lives)
        life = touches.life[is_collective[touches.raw_op]]
        rows = recording.spread(is_collective, fill=False)
        lives = end_buffers_of_collectives(timeline, lives, rows, life[life != NONE])
    ended = np.where(timeline.event_bytes > 0, 0, reused_ends(timeline, lives))
    return lives, replace(Elsewhere.nothing(len(ended), recording.rows), change=ended)


def _has_totals(recording: Recording) -> bool:
    """Returns whether every event carries the allocator's count, and all that it counts is known."""
    totals = recording.memory_events.total
    # On a device, the allocator lists everything in use, whenever the recorder started.
    is_incomplete = recording.is_late and recording.memory_events.device == CPU
    return recording.epoch.source == "native" and not is_incomplete and len(totals) > 0 and bool(totals[0] >= 0)


def _notes(elsewhere: Elsewhere, lost: int) -> tuple[str, ...]:
    notes = []
    if lost > 0:
        notes.append(
            f"{lost:,} allocations and frees are missing: the job's own history of the allocator does not have them "
            "(max_entries of _record_memory_history)"
        )
    if elsewhere.missing_bytes:
        notes.append(
            f"{elsewhere.missing_bytes:,} bytes that Python held at the beginning are not in the allocator's count"
        )
    taken = int(elsewhere.size_bytes[elsewhere.created != NONE].sum())
    if taken:
        notes.append(f"other threads took {taken:,} bytes while the job was recorded; they are in category unknown")
    return tuple(notes)


def _facts(recording: Recording, lives: BlockLives, storage_of_life: Ints, foreign: Foreign) -> Facts:
    columns = recording.in_epoch("facts")
    position = recording.timeline.position(columns["time_ns"])
    storage = storage_of_life[lives.find(columns["address"], position)]
    storage = np.where(storage == NONE, foreign.of_address(columns["address"]), storage)
    is_matched = storage != NONE
    tensor = columns["tensor"][is_matched]
    return Facts(
        storage=storage[is_matched],
        category=columns["category"][is_matched],
        name=columns["name"][is_matched],
        module=columns["module"][is_matched],
        tensor=tensor,
        family=recording.tensors.families()[tensor],
    )


def _held(recording: Recording, lives: BlockLives, storage_of_life: Ints, foreign: Foreign) -> Ints:
    """Returns the storage of each statement on what holds a tensor, before storages are sorted."""
    records = holder_records(recording.spool)
    address = np.array([record["address"] for record in records], dtype=np.int64)
    times = np.array([record["time_ns"] for record in records], dtype=np.int64)
    storage: Ints = storage_of_life[lives.find(address, recording.timeline.position(times))]
    return np.where(storage == NONE, foreign.of_address(address), storage)


def _attributes(facts: Facts, touches: Touches, storage: Ints, created: Ints, ops: Ops) -> tuple[Ints, Ints, Ints]:
    """Returns tensor, module and name of each storage: from recorded facts first, else from its creator."""
    tensor, module, name = (np.full(len(created), NONE, dtype=np.int64) for _ in range(3))
    is_written = (touches.role == WRITE) & (storage != NONE)
    tensor[storage[is_written][::-1]] = touches.tensor[is_written][::-1]
    is_unseen = tensor[facts.storage] == NONE
    tensor[facts.storage[is_unseen][::-1]] = facts.tensor[is_unseen][::-1]
    is_made = created != NONE
    module[is_made] = ops.module_id[created[is_made]]
    for column, stated in ((name, facts.name), (module, facts.module)):
        is_stated = stated != NONE
        column[facts.storage[is_stated][::-1]] = stated[is_stated][::-1]
    return tensor, module, name


def _qualified(names: Texts, category: Texts, module: Ints, modules: Modules) -> Texts:
    """Qualifies names: a buffer's by its module, and those of a second model by its root."""
    owners = np.append(modules.name, "")[module]
    roots: list[str] = []
    for name, parent in zip(modules.name.tolist(), modules.parent_id.tolist(), strict=True):
        roots.append(name if parent == NONE else roots[parent])
    result = names.copy()
    for i in np.flatnonzero((names != "") & (module != NONE)):
        prefix = owners[i] if category[i] == "buffer" else roots[module[i]]
        if prefix:
            result[i] = f"{prefix}.{names[i]}"
    return result


def _unique_uses(op: Ints, storage: Ints, role: Ints) -> Uses:
    """Drops repeated uses: an operator that takes a storage twice uses it once per role."""
    is_known = storage != NONE
    keys = np.unique(np.stack([op[is_known], storage[is_known], role[is_known]], axis=1), axis=0)
    return Uses.of(op_id=keys[:, 0], storage_id=keys[:, 1], role=np.array(ROLES, dtype=np.object_)[keys[:, 2]])
