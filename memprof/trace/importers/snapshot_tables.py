"""A snapshot's device as the tables of a trace: a row per allocation, and everything that existed before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from memprof.phases import TRAINING
from memprof.trace.importers.allocations import pending_after
from memprof.trace.importers.called_modules import CalledModules, find_modules
from memprof.trace.importers.columns import ALLOC, OOM, SEGMENT_GROWS, Entries
from memprof.trace.importers.device import HOST, DeviceHistory
from memprof.trace.importers.frames import NO_STACK, Stack
from memprof.trace.importers.phases import FindPhases, Phases, step_table
from memprof.trace.importers.purposes import BY_PROFILER, Lives, Purposes, find_purposes
from memprof.trace.importers.snapshot_events import (
    allocator_events,
    annotation_table,
    noted_of_lives,
    noted_phases,
)
from memprof.trace.schema import (
    CATEGORIES,
    NONE,
    AllocatorEvents,
    Annotations,
    Bools,
    Floats,
    Ints,
    Memory,
    ModuleCalls,
    Modules,
    Ops,
    OutOfMemory,
    Segments,
    Stacks,
    Steps,
    Storages,
    Table,
    Texts,
)
from memprof.trace.step import sum_at

#: Names of the rows that are not allocations of the history.
BEGINNING = "(recording begins)"
AT_END = "(in use at the end)"


@dataclass(frozen=True, eq=False)
class _Rows:
    """The operators of a device; each column of shape ``(ops,)``.

    Attributes:
        entry: History entry of each; NONE for the first and for those of an end state.
        stacks: Their stacks.
        time_us: Time of each; NaN where unknown.
        created: Operator that created each life, shape ``(lives,)``.
        freed: Operator after which each life was freed, shape ``(lives,)``.
    """

    entry: Ints
    stacks: list[Stack]
    time_us: Floats
    created: Ints
    freed: Ints

    def __len__(self) -> int:
        return len(self.entry)


def device_tables(
    device: DeviceHistory, find_phases: FindPhases, *, reads_modules: bool = True
) -> tuple[dict[type[Table], Table], Phases]:
    """Builds the tables of one device.

    Args:
        device: The device.
        find_phases: Derives steps and phases.
        reads_modules: Read modules off the stacks; else there are no tables of modules, and no row has one, as for a
            job whose modules are recorded.

    Returns:
        The tables, and the derived steps and phases.
    """
    rows = _timeline(device) if device.facts.has_timeline else _end_state(device)
    phases = find_phases(rows.stacks, rows.time_us)
    named = _named_phases(device, rows)
    is_training = np.logical_or.reduce([named == name for name in TRAINING])  # faster than isin, which sorts texts
    phases = replace(phases, phase=np.where(is_training, named, phases.phase))
    # The rows of an end state are in no order of time.
    stacks = rows.stacks if device.facts.has_timeline and reads_modules else []
    called = find_modules(stacks, phases.step, phases.phase)
    order = np.argsort(rows.created, kind="stable")
    storages = _storages(device, rows, phases, called, order)
    # Purposes follow from training's phases; the tables have those that the job names as well.
    phases = replace(phases, phase=np.where(named != "", named, phases.phase))
    modules: Mapping[type[Table], Table] = {Modules: called.modules, ModuleCalls: called.calls}
    tables: Mapping[type[Table], Table] = {
        Steps: step_table(phases, rows.time_us, is_cut_off=bool(device.facts.out_of_memory)),
        Ops: _ops(device, rows, phases, called),
        Storages: storages,
        Memory: _memory(device, rows, storages),
        AllocatorEvents: allocator_events(device, np.minimum(np.cumsum(_is_row(device.entries)), len(rows) - 1)),
        Annotations: annotation_table(device),
        OutOfMemory: _failures(device, rows, phases, called),
        Segments: device.segments,
        Stacks: device.stacks.table(),
    }
    return {**tables, **(modules if reads_modules else {})}, phases


def _timeline(device: DeviceHistory) -> _Rows:
    """A row for the beginning, then one for each allocation of the history, also those that failed."""
    entries, lives = device.entries, device.lives
    is_row = _is_row(entries)
    entry = np.concatenate(([NONE], np.flatnonzero(is_row))).astype(np.int64)
    time_us = np.concatenate((entries.time_us[:1], entries.time_us[entry[1:]]))
    # An entry belongs to the last allocation at or before it, or to row 0 before the first allocation.
    row_of = np.cumsum(is_row)
    before = np.concatenate(([0], row_of[:-1]))
    return _Rows(
        entry=entry,
        stacks=[NO_STACK, *(entries.stacks[place] for place in entry[1:].tolist())],
        time_us=time_us,
        created=np.where(lives.alloc == NONE, NONE, row_of[lives.alloc]),
        freed=np.where(lives.free == NONE, NONE, before[lives.free]),
    )


def _named_phases(device: DeviceHistory, rows: _Rows) -> Texts:
    """Returns the phase that the metadata of each operator's allocation names, "" where it names none."""
    metadata = device.entries.user_metadata
    if not any(metadata):
        return np.full(len(rows), "", dtype=object)
    return noted_phases(["" if entry == NONE else metadata[entry] for entry in rows.entry.tolist()])


def _is_row(entries: Entries) -> Bools:
    """Returns which entries have a row of their own, shape ``(entries,)``."""
    is_row: Bools = np.isin(entries.action, (ALLOC, OOM))
    return is_row


def _end_state(device: DeviceHistory) -> _Rows:
    """A row per code location whose memory is in use at the end: their order is unknown without a history."""
    entries, blocks, lives = device.entries, device.blocks, device.lives
    stacks: dict[int, Stack] = {}
    for block in lives.block[lives.block != NONE].tolist():
        stack = blocks.stacks[block]
        if stack.stack_id != NONE:
            stacks.setdefault(stack.stack_id, stack)
    row_of = {stack_id: row for row, stack_id in enumerate(stacks, start=1)}
    created = [
        NONE if block == NONE else row_of.get(blocks.stacks[block].stack_id, NONE) for block in lives.block.tolist()
    ]
    count = 1 + len(stacks)
    time_us = np.full(count, np.nan)
    time_us[:] = entries.time_us[-1] if len(entries) else np.nan
    return _Rows(
        entry=np.full(count, NONE, dtype=np.int64),
        stacks=[NO_STACK, *stacks.values()],
        time_us=time_us,
        created=np.array(created, dtype=np.int64).reshape(-1),
        freed=np.where(lives.free == NONE, NONE, 0).astype(np.int64),
    )


def _ops(device: DeviceHistory, rows: _Rows, phases: Phases, called: CalledModules) -> Ops:
    is_taken = rows.entry != NONE
    names = [stack.operator or stack.function or ("(no stack)" if taken else AT_END) for stack, taken in _named(rows)]
    names[0] = BEGINNING
    stream = np.zeros(len(rows), dtype=np.int64)
    stream[is_taken] = device.entries.stream[rows.entry[is_taken]]
    return Ops.of(
        op_id=np.arange(len(rows)),
        step=phases.step,
        phase=phases.phase,
        module_id=called.of_rows(np.arange(len(rows))),
        name=names,
        kind=["allocation"] * len(rows),
        start_us=rows.time_us,
        stream=stream,
        stack_id=[stack.stack_id for stack in rows.stacks],
    )


def _named(rows: _Rows) -> list[tuple[Stack, bool]]:
    return list(zip(rows.stacks, (rows.entry != NONE).tolist(), strict=True))


def _storages(device: DeviceHistory, rows: _Rows, phases: Phases, called: CalledModules, order: Ints) -> Storages:
    lives, purposes = device.lives, _purposes(device, rows, phases)
    return Storages.of(
        storage_id=np.arange(len(order)),
        category=purposes.category[order],
        category_source=purposes.how[order],
        module_id=called.of_rows(rows.created[order]),
        device=[device.name] * len(order),
        requested_bytes=lives.requested[order],
        allocated_bytes=lives.allocated[order],
        created_op_id=rows.created[order],
        freed_op_id=rows.freed[order],
        metadata=noted_of_lives(device.entries, device.blocks, lives)[order],
    )


def _purposes(device: DeviceHistory, rows: _Rows, phases: Phases) -> Purposes:
    """Returns the category of each life: the file's own, else as far as its stack or its two phases determine it."""
    given, born_at = device.entries.category, device.lives.alloc
    if given is not None:
        category = np.array(["unknown" if entry == NONE else given[entry] for entry in born_at.tolist()], dtype=object)
        return Purposes(category, np.where(category == "unknown", "", BY_PROFILER).astype(object))
    if not device.facts.has_timeline or device.number == HOST:  # pinned memory is in no phase's way
        count = len(rows.created)
        return Purposes(np.full(count, "unknown", dtype=object), np.full(count, "", dtype=object))
    found = find_purposes(Lives(rows.created, rows.freed, device.lives.requested, phases.phase, rows.stacks))
    noted, made = _noted_categories(device.entries), born_at != NONE
    if noted is not None:
        found.category[made], found.how[made] = noted[born_at[made]], BY_PROFILER
    return found


def _noted_categories(entries: Entries) -> Texts | None:
    """Returns the categories that an export of memprof's notes at each allocation; None for other histories."""
    if not any(entries.user_metadata):
        return None
    noted = np.array([note.partition(" ")[0] for note in entries.user_metadata], dtype=object)
    own = noted[entries.action == ALLOC]
    return noted if len(own) and np.isin(own, CATEGORIES).all() else None


def _memory(device: DeviceHistory, rows: _Rows, storages: Storages) -> Memory:
    """Builds the counters: allocated bytes as replayed, reserved bytes as the peak of the entries up to each row."""
    ops = len(rows)
    born = sum_at(storages.created_op_id, storages.allocated_bytes, ops)
    freed = sum_at(storages.freed_op_id, storages.allocated_bytes, ops)
    start = int(storages.allocated_bytes[storages.created_op_id == NONE].sum())
    allocated = start + np.cumsum(born) - (np.cumsum(freed) - freed)
    entries, reserved = device.entries, device.reserved
    highest = np.full(ops, reserved.end, dtype=np.int64)
    pending = np.full(ops, int(device.blocks.size[device.blocks.is_pending].sum()), dtype=np.int64)
    if device.facts.has_timeline:
        # Segments are allocated right before the allocation that needs them, and count with it.
        is_ahead = np.isin(entries.action, SEGMENT_GROWS)
        row_of = np.minimum(np.cumsum(_is_row(entries)) + is_ahead, ops - 1)
        highest[:] = NONE
        np.maximum.at(highest, row_of, reserved.after)
        highest[0] = max(int(highest[0]), reserved.start)
        waiting = pending_after(entries, device.blocks)
        pending[1:] = waiting[rows.entry[1:]]
        pending[0] = waiting[0]
    return Memory.of(
        op_id=np.arange(ops),
        time_us=rows.time_us,
        device=[device.name] * ops,
        allocated_bytes=allocated,
        active_bytes=allocated + pending,
        reserved_bytes=highest,
        host_rss_bytes=np.full(ops, NONE),
    )


def _failures(device: DeviceHistory, rows: _Rows, phases: Phases, called: CalledModules) -> OutOfMemory:
    """Builds the table of failed requests: those of the history, each after the last row before it."""
    entries, lives = device.entries, device.lives
    failed = np.flatnonzero(entries.action == OOM)
    change = np.zeros(len(entries) + 1, dtype=np.int64)
    born, freed = lives.alloc != NONE, lives.free != NONE
    np.add.at(change, lives.alloc[born], lives.allocated[born])
    np.subtract.at(change, lives.free[freed], lives.allocated[freed])
    held = int(lives.allocated[~born].sum()) + np.cumsum(change)
    row = np.minimum(np.cumsum(_is_row(entries))[failed], len(rows) - 1)
    last = int(np.flatnonzero(entries.action == ALLOC).max(initial=NONE))
    stacks = [entries.stacks[place] for place in failed.tolist()]
    return OutOfMemory.of(
        time_us=entries.time_us[failed],
        device=[device.name] * len(failed),
        step=phases.step[row],
        op_id=row,
        name=[stack.operator or stack.function for stack in stacks],
        phase=[stack.phase or str(phases.phase[place]) for stack, place in zip(stacks, row.tolist(), strict=True)],
        module_id=called.of_rows(row),
        stack_id=[stack.stack_id for stack in stacks],
        requested_bytes=entries.size[failed],
        allocated_bytes=held[failed],
        reserved_bytes=device.reserved.after[failed],
        largest_free_bytes=np.full(len(failed), NONE),
        free_bytes=entries.address[failed],
        total_bytes=np.full(len(failed), NONE),
        is_caught=failed < last,
        message=[""] * len(failed),
    )
