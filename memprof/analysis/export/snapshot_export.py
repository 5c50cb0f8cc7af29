"""Exports a recording as a memory snapshot: as it was recorded, or at addresses that the allocator's model assigns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from memprof.analysis.report.saved import PERMANENT
from memprof.errors import BadInputError
from memprof.policies.allocator.policy import parse_options
from memprof.replay.allocator.blocks import ALLOCATED, FREE, UNMAPPED, Block
from memprof.replay.allocator.blocks import PENDING as PENDING_BLOCK
from memprof.replay.allocator.events import ALLOCATE, Ids, Replay, replay
from memprof.replay.allocator.model import SegmentEvent
from memprof.replay.allocator.recorded_requests import blocks_in_use, requests_of_trace
from memprof.replay.allocator.rules import settings_from_options
from memprof.replay.allocator.steps import StepRequests
from memprof.trace.exporters.snapshot import (
    ACTIVE,
    INACTIVE,
    PENDING,
    Blocks,
    DeviceSnapshot,
    EventRows,
    History,
    write_snapshot,
)
from memprof.trace.files.coded import Coded
from memprof.trace.importers.metadata import SAVED
from memprof.trace.schema import (
    ACTIONS,
    NONE,
    AllocatorEvents,
    Annotations,
    Floats,
    Ints,
    Modules,
    Ops,
    Saved,
    Segments,
    Stacks,
    Storages,
)
from memprof.trace.store import Trace

#: Requests written at a time.
_CHUNK = 1 << 16
_ALLOC, _REQUESTED, _COMPLETED = (ACTIONS.index(action) for action in ("alloc", "free_requested", "free_completed"))


def export_snapshot(trace: Trace, file: BinaryIO) -> None:
    """Writes a rank's recording in torch's memory snapshot format.

    An imported snapshot keeps its events, addresses and segments. Of other recordings, all requests are replayed in
    order through the model of the caching allocator, with the options in force: addresses and segments are the
    model's, not the device's.

    Raises:
        BadInputError: It contains no memory events, or is damaged.
    """
    recorded = recorded_snapshot(trace)
    if recorded is not None:
        write_snapshot(file, recorded, trace.table(Stacks), trace.manifest.machine.allocator_settings)
        return
    issued = requests_of_trace(trace)
    if not len(issued.requests):
        raise BadInputError(f"{trace.path} contains no memory events to export as a snapshot.")
    options = trace.manifest.machine.allocator_settings if issued.device != "cpu" else ""
    try:
        settings = settings_from_options(parse_options(options))
    except ValueError:
        raise BadInputError(f"{trace.path} has allocator options that torch does not accept: {options}.") from None
    done = replay(issued.requests, settings)
    stacks: Ints = trace.columns(Ops, "stack_id")["stack_id"]
    stack_of = np.full(len(issued.made_by), NONE)
    is_made = issued.made_by != NONE
    stack_of[is_made] = stacks[issued.made_by[is_made]]
    del stacks, is_made
    notes, note_of = describe_allocations(trace, issued)
    segments, blocks = _end(done, stack_of, issued.device)
    place = issued.device.rpartition(":")[2]
    number = int(place) if place.isdecimal() else 0  # damaged, it may be anything
    start_us: Floats = trace.columns(Ops, "start_us")["start_us"]
    history = History(
        actions=ACTIONS,
        notes=["", *notes],
        contexts=[""],
        pools=[""],
        chunks=_chunks(issued, done, start_us, stack_of, note_of + 1),
    )
    device = DeviceSnapshot(number, history, segments, blocks, Annotations.empty())
    write_snapshot(file, device, trace.table(Stacks), options)


def _chunks(issued: StepRequests, done: Replay, start_us: Floats, stack_of: Ints, note_of: Ids) -> Iterator[EventRows]:
    """Yields the history: segments when they are reserved, and two events per free, as torch does."""
    log = done.segment_events
    at = np.array([one.event for one in log], dtype=np.int64)
    for low in range(0, done.events, _CHUNK):
        high = min(low + _CHUNK, done.events)
        first, last = np.searchsorted(at, [low, high]).tolist()
        yield _chunk(issued, done, start_us, stack_of, note_of, slice(low, high), log[first:last])


def _chunk(
    issued: StepRequests,
    done: Replay,
    start_us: Floats,
    stack_of: Ints,
    note_of: Ids,
    events: slice,
    log: Sequence[SegmentEvent],
) -> EventRows:
    requests = issued.requests
    kind, allocation, op_id = requests.kind[events], requests.allocation[events], issued.op_id[events]
    is_made = done.address[allocation] != NONE
    # A free is two rows; a segment's row precedes the request that needed it.
    own = np.repeat(np.flatnonzero(is_made), np.where(kind[is_made] == ALLOCATE, 1, 2))
    is_second = np.zeros(len(own), dtype=np.bool_)
    is_second[1:] = own[1:] == own[:-1]
    row = np.concatenate([own, np.array([one.event - events.start for one in log], dtype=np.int64)])
    order = np.lexsort((np.concatenate([1 + is_second, np.zeros(len(log))]), row))
    row, is_log = row[order], order >= len(own)
    about = allocation[row]
    action = np.concatenate(
        [
            np.where(kind[own] == ALLOCATE, _ALLOC, np.where(is_second, _COMPLETED, _REQUESTED)),
            np.array([ACTIONS.index(one.action) for one in log], dtype=np.int64),
        ]
    )
    address = np.concatenate([done.address[allocation[own]], np.array([one.address for one in log], dtype=np.int64)])
    size = np.concatenate([requests.size[allocation[own]], np.array([one.size for one in log], dtype=np.int64)])
    none = np.zeros(len(row), dtype=np.int8)
    return {
        "action": action[order],
        "addr": address[order],
        "size": size[order],
        "stream": requests.stream[about],
        "time_us": start_us[np.maximum(op_id[row], 0)] if len(start_us) else np.zeros(len(row)),
        "compile_context": none,
        "user_metadata": np.where(is_log, 0, note_of[about]),
        "pool_id": none,
        "frames": stack_of[about],
    }


def _end(done: Replay, stack_of: Ints, device: str) -> tuple[Segments, Blocks]:
    """Writes the segments and blocks after the last event; of expandable segments, the mapped part."""
    names = {ALLOCATED: ACTIVE, FREE: INACTIVE}
    rows: list[dict[str, Any]] = []
    blocks: list[tuple[int, Block]] = []
    for segment in sorted(done.allocator.segments.values(), key=lambda one: one.address):
        held = [block for block in segment.blocks() if block.state != UNMAPPED]
        used = [block for block in held if block.state != FREE]
        allocated = sum(block.size for block in used if block.state == ALLOCATED)
        blocks += [(len(rows), block) for block in held]
        rows.append(
            {
                "device": device,
                "address": segment.address,
                "total_size_bytes": sum(block.size for block in held),
                "allocated_size_bytes": allocated,
                "active_size_bytes": sum(block.size for block in used),
                "requested_size_bytes": sum(block.requested for block in used),
                "stream": segment.pool.stream,
                "segment_type": "small" if segment.pool.is_small else "large",
                "is_expandable": segment.is_expandable,
            }
        )
    table = Segments.of(**{name: [row[name] for row in rows] for name in rows[0]}) if rows else Segments.empty()
    stacks = [NONE if block.state == FREE else int(stack_of[block.allocation]) for _, block in blocks]
    return table, Blocks.of(
        [
            (row, block.address, block.size, block.requested, names.get(block.state, PENDING), stack)
            for (row, block), stack in zip(blocks, stacks, strict=True)
        ]
    )


def describe_allocations(trace: Trace, issued: StepRequests) -> tuple[list[Mapping[str, str]], Ids]:
    """Describes each allocation, such as ``{"category": "activation", "module": "layers.0 (Block)"}``.

    Returns:
        The distinct descriptions, whose keys ``memprof import`` reads, and the index of each allocation's, shape
        ``(allocations,)``.
    """
    notes: list[Mapping[str, str]] = [{}]
    index = np.zeros(len(issued.storage_id), dtype=np.int64)
    for name, codes, texts in _parts(trace, issued):
        # What is told so far and this part are one number: of all parts at once, it could exceed 64 bits.
        found, index = np.unique(index * len(texts) + codes, return_inverse=True)
        rows = [divmod(one, len(texts)) for one in found.tolist()]
        notes = [{**notes[told], **({name: texts[code]} if texts[code] else {})} for told, code in rows]
    return notes, index.astype(np.int32)


def _parts(trace: Trace, issued: StepRequests) -> Iterator[tuple[str, Ints, list[str]]]:
    """Yields the parts of descriptions: a key, the code of each allocation, and the text of each code."""
    storage, op = issued.storage_id, issued.made_by

    def coded(table: type[Ops | Storages], column: str, rows: Ints, none: str = "") -> tuple[Ints, list[str]]:
        values: Coded = trace.columns(table, column)[column]
        # NONE is the last: no storage, or no operator.
        return np.append(values.codes, len(values.distinct))[rows], [*map(str, values.distinct), none]

    yield "category", *coded(Storages, "category", storage, "workspace")
    yield "name", *coded(Storages, "name", storage)
    yield "operator", *coded(Ops, "name", op)
    modules = trace.table(Modules)
    titles = [
        f"{name} ({kind})".strip() if kind else name for name, kind in zip(modules.name, modules.type, strict=True)
    ]
    owners, runners = (np.append(trace.columns(table, "module_id")["module_id"], NONE) for table in (Storages, Ops))
    yield "module", 1 + np.where(storage == NONE, runners[op], owners[storage]), ["", *titles]
    yield "phase", *coded(Ops, "phase", op)
    saved, uses = trace.table(Saved), trace.columns(Storages, "category")["category"]
    first = np.argsort(saved.forward_op_id, kind="stable")
    rows, places = np.unique(saved.storage_id[first], return_index=True)
    names: Coded = trace.columns(Ops, "name")["name"]
    own = names.codes[saved.forward_op_id[first][places]] * (1 + len(modules)) + saved.module_id[first][places] + 1
    distinct, codes = np.unique(own, return_inverse=True)
    savers = np.zeros(len(owners), dtype=np.int64)
    savers[rows] = 1 + codes
    savers[:-1][np.isin(uses.distinct, PERMANENT)[uses.codes]] = 0  # alive anyway
    pairs = [(names.distinct[one // (1 + len(modules))], one % (1 + len(modules)) - 1) for one in distinct.tolist()]
    texts = [name if module == NONE else f"{name} in {modules.name[module] or 'the model'}" for name, module in pairs]
    yield SAVED, savers[storage], ["", *texts]


def recorded_snapshot(trace: Trace) -> DeviceSnapshot | None:
    """Returns an imported snapshot with its recorded events; None for recordings without block sizes and segments."""
    events, segments = trace.table(AllocatorEvents), trace.table(Segments)
    if not len(segments) or not bool((events.block_bytes != NONE).any()):
        return None
    device = str(segments.device[0])
    history = events.take(events.index != NONE)
    return DeviceSnapshot(
        number=int(device.rpartition(":")[2]) if ":" in device else 0,
        history=_history(history),
        segments=segments,
        blocks=_blocks(events, segments),
        annotations=trace.table(Annotations),
    )


def _history(events: AllocatorEvents) -> History:
    action, note = Coded.of(events.action), Coded.of(events.user_metadata)
    context, pool = Coded.of(events.compile_context), Coded.of(events.pool)
    rows: EventRows = {
        "action": action.codes,
        "addr": events.address,
        "size": events.size_bytes,
        "stream": events.stream,
        "time_us": events.time_us,
        "compile_context": context.codes,
        "user_metadata": note.codes,
        "pool_id": pool.codes,
        "frames": events.stack_id,
    }
    return History(
        actions=action.distinct.tolist(),
        notes=note.distinct.tolist(),
        contexts=context.distinct.tolist(),
        pools=pool.distinct.tolist(),
        chunks=({key: one[low : low + _CHUNK] for key, one in rows.items()} for low in range(0, len(events), _CHUNK)),
    )


def _blocks(events: AllocatorEvents, segments: Segments) -> Blocks:
    """Returns the blocks of the segments: those in use after the last event, and what is free between them."""
    used = blocks_in_use(events)
    rows: list[tuple[int, int, int, int, str, int]] = []
    addresses = np.array(sorted(used), dtype=np.int64)
    for row, (start, total) in enumerate(
        zip(segments.address.tolist(), segments.total_size_bytes.tolist(), strict=True)
    ):
        position, end = start, start + total
        for address in addresses[slice(*np.searchsorted(addresses, [start, end]))].tolist():
            size, requested, state, stack = used[address]
            if address > position:
                rows.append((row, position, address - position, 0, INACTIVE, NONE))
            rows.append((row, address, size, requested, PENDING if state == PENDING_BLOCK else ACTIVE, stack))
            position = address + size
        if position < end:
            rows.append((row, position, end - position, 0, INACTIVE, NONE))
    return Blocks.of(rows)
