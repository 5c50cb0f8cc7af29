"""Builds traces in a few lines: operators that allocate, read, change and free named storages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from memprof.trace.files.columns import StoredTable, decode_table
from memprof.trace.manifest import Manifest
from memprof.trace.schema import (
    NONE,
    AllocatorEvents,
    Memory,
    ModuleCalls,
    Modules,
    Ops,
    Saved,
    Stacks,
    Steps,
    Storages,
    Table,
    Uses,
)
from memprof.trace.step import Step
from memprof.trace.store import Trace

Read = TypeVar("Read", bound=Table)

Tables = dict[type[Table], Table]


@dataclass(frozen=True)
class Module:
    """A module; its parent is the one whose name is one dotted part shorter (the root's name is "")."""

    name: str
    type: str = "Linear"
    parameter_bytes: int = 0


@dataclass(frozen=True)
class Storage:
    """A storage by its key. It is allocated where an operator ``makes`` it, or live from the start if none does."""

    key: str
    size: int
    category: str = "activation"
    name: str = ""
    module: str | None = None
    requested: int | None = None
    shape: str = ""
    dtype: str = "float32"


@dataclass(frozen=True)
class Op:
    """An operator. Storages are given by their keys; ``forward`` is the position in the step of its forward operator.

    ``saves`` are the storages it keeps for backward, released by the last operator with this one as ``forward``
    that reads them. ``module`` is a module's name, ``None`` for outside.
    """

    name: str = "aten.mul.Tensor"
    phase: str = "forward"
    module: str | None = None
    makes: Sequence[str] = ()
    reads: Sequence[str] = ()
    mutates: Sequence[str] = ()
    frees: Sequence[str] = ()
    saves: Sequence[str] = ()
    workspace: int = 0
    duration_us: float = 1.0
    flops: int = 0
    kind: str = "compute"
    forward: int | None = None
    is_recompute: bool = False
    uses_rng: bool = False
    stack: str = ""
    micro_batch: int = 0


@dataclass
class _Rows:
    """Rows of the tables while they are written down."""

    ops: list[dict[str, Any]] = field(default_factory=list)
    storages: list[dict[str, Any]] = field(default_factory=list)
    uses: list[dict[str, Any]] = field(default_factory=list)
    saved: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)


def make_step(
    ops: Sequence[Op], storages: Sequence[Storage], modules: Sequence[Module] = (), duration_us: float = 1000.0
) -> Step:
    """Builds the step that runs the given operators; it passes ``Step.check``."""
    return make_trace([ops], storages, modules, durations_us=[duration_us]).step(0)


def make_trace(
    steps: Sequence[Sequence[Op]],
    storages: Sequence[Storage],
    modules: Sequence[Module] = (),
    kinds: Sequence[str] = (),
    durations_us: Sequence[float] = (),
    manifest: Manifest | None = None,
) -> Trace:
    """Builds a trace in memory; arguments as in ``make_tables``."""
    tables = make_tables(steps, storages, modules, kinds, durations_us)
    return Trace.of([(manifest or Manifest(target="train.py"), tables)], Path("made-by-hand.memprof"))


def make_tables(
    steps: Sequence[Sequence[Op]],
    storages: Sequence[Storage],
    modules: Sequence[Module] = (),
    kinds: Sequence[str] = (),
    durations_us: Sequence[float] = (),
) -> Tables:
    """Returns every table of a small job on CPU.

    Args:
        steps: The operators of each step; a step without any gets its row in ``steps`` only.
        storages: Every storage the operators name. One that is allocated again after it was freed has a second life.
        modules: Modules in order of their ids; those operators name and their parents are added.
        kinds: The kind of each step, "recorded" where left out.
        durations_us: The duration of each step, 1000 where left out.

    Returns:
        The tables. Counters and allocator events follow from walking the operators one by one.
    """
    named = _all_modules(modules, steps, storages)
    module_ids: dict[str | None, int] = {None: NONE, **{module.name: row for row, module in enumerate(named)}}
    stacks = list(dict.fromkeys(op.stack for ops in steps for op in ops if op.stack))
    kept = {storage.key: storage for storage in storages}
    rows = _Rows()
    alive: dict[str, int] = {}  # key -> row in rows.storages
    born: set[str] = set()
    from_before = set(kept) - {key for ops in steps for op in ops for key in op.makes}
    for op in (op for ops in steps for op in ops):  # what is touched before it is first made was there before
        from_before |= {*op.reads, *op.mutates, *op.frees} - {*op.makes} - born
        born.update(op.makes)
    for key, storage in kept.items():
        if key in from_before:
            _bear(rows, alive, storage, NONE, module_ids)
    for number, ops in enumerate(steps):
        first = len(rows.ops)
        for position, op in enumerate(ops):
            _run(rows, alive, kept, op, number, first, position, ops, module_ids, stacks)
        _add_calls(rows, named, ops, number, first, module_ids)
        rows.steps.append(
            {
                "step": number,
                "kind": kinds[number] if number < len(kinds) else "recorded",
                "start_us": 1000.0 * number,
                "duration_us": durations_us[number] if number < len(durations_us) else 1000.0,
                "micro_batches": 1 + max((op.micro_batch for op in ops), default=0),
                "optimizer_updates": 1,
                "first_op_id": first if ops else NONE,
                "last_op_id": len(rows.ops) - 1 if ops else NONE,
                "is_complete": True,
            }
        )
    return {
        Modules: Modules.of(
            module_id=range(len(named)),
            name=[module.name for module in named],
            type=[module.type for module in named],
            parent_id=[module_ids[_parent(module.name)] for module in named],
            parameter_bytes=[module.parameter_bytes for module in named],
        ),
        Stacks: Stacks.of(stack_id=range(len(stacks)), frames=stacks),
        ModuleCalls: _table(ModuleCalls, rows.calls),
        Steps: _table(Steps, rows.steps),
        Ops: _table(Ops, rows.ops),
        Storages: _table(Storages, rows.storages),
        Uses: _table(Uses, rows.uses),
        Saved: _table(Saved, rows.saved),
        Memory: _table(Memory, rows.memory),
        AllocatorEvents: _table(AllocatorEvents, rows.events),
    }


def read_table(kind: type[Read], data: bytes, **options: Any) -> Read:
    """Returns the table in Parquet bytes."""
    return decode_table(kind, StoredTable(kind, data, **options))


def assert_tables_equal(one: Table, other: Table) -> None:
    """Asserts that two tables have the same columns, types and values."""
    assert type(one) is type(other)
    for column in one.columns():
        values = getattr(other, column.name)
        assert values.dtype == column.dtype
        np.testing.assert_array_equal(getattr(one, column.name), values)


def _table(kind: type[Table], rows: Sequence[Mapping[str, Any]]) -> Table:
    return kind.of(
        **{
            column.name: [row[column.name] for row in rows]
            for column in kind.columns()
            if rows and column.name in rows[0]
        }
    )


def _all_modules(modules: Sequence[Module], steps: Sequence[Sequence[Op]], storages: Sequence[Storage]) -> list[Module]:
    named = {module.name: module for module in modules}
    used = [op.module for ops in steps for op in ops] + [storage.module for storage in storages] + list(named)
    for name in used:
        for part in _path(name) if name is not None else []:
            named.setdefault(part, Module(part, type="Model" if part == "" else "Linear"))
    return list(named.values())


def _parent(name: str) -> str | None:
    if name == "":
        return None
    return name.rpartition(".")[0]


def _bear(
    rows: _Rows, alive: dict[str, int], storage: Storage, op_id: int, module_ids: Mapping[str | None, int]
) -> None:
    if storage.key in alive:
        raise ValueError(f"storage {storage.key!r} is made while it is alive")
    alive[storage.key] = len(rows.storages)
    rows.storages.append(
        {
            "storage_id": len(rows.storages),
            "category": storage.category,
            "name": storage.name,
            "module_id": module_ids[storage.module],
            "device": "cpu",
            "requested_bytes": storage.size if storage.requested is None else storage.requested,
            "allocated_bytes": storage.size,
            "created_op_id": op_id,
            "freed_op_id": NONE,
            "shape": storage.shape,
            "dtype": storage.dtype,
        }
    )


def _run(
    rows: _Rows,
    alive: dict[str, int],
    kept: Mapping[str, Storage],
    op: Op,
    step: int,
    first: int,
    position: int,
    ops: Sequence[Op],
    module_ids: Mapping[str | None, int],
    stacks: Sequence[str],
) -> None:
    op_id = first + position
    for key in op.makes:
        _bear(rows, alive, kept[key], op_id, module_ids)
        _add_event(rows, "alloc", alive[key], kept[key], op_id)
    for role, keys in (("read", op.reads), ("write", op.makes), ("mutate", op.mutates)):
        rows.uses += [{"op_id": op_id, "storage_id": alive[key], "role": role} for key in keys]
    rows.ops.append(
        {
            "op_id": op_id,
            "step": step,
            "micro_batch": op.micro_batch,
            "phase": op.phase,
            "module_id": module_ids[op.module],
            "name": op.name,
            "kind": op.kind,
            "start_us": 1000.0 * step + position,
            "duration_us": op.duration_us,
            "flops": op.flops,
            "read_bytes": sum(kept[key].size for key in op.reads),
            "written_bytes": sum(kept[key].size for key in (*op.makes, *op.mutates)),
            "is_recompute": op.is_recompute,
            "forward_op_id": NONE if op.forward is None else first + op.forward,
            "stack_id": stacks.index(op.stack) if op.stack else NONE,
            "uses_rng": op.uses_rng,
            "mutates": bool(op.mutates),
            "workspace_bytes": op.workspace,
        }
    )
    for key in op.saves:
        readers = [at for at, later in enumerate(ops) if later.forward == position and key in later.reads]
        rows.saved.append(
            {
                "storage_id": alive[key],
                "forward_op_id": op_id,
                "module_id": module_ids[op.module],
                "released_op_id": first + readers[-1] if readers else NONE,
            }
        )
    held = sum(rows.storages[row]["allocated_bytes"] for row in alive.values()) + op.workspace
    rows.memory.append(
        {
            "op_id": op_id,
            "time_us": 1000.0 * step + position,
            "device": "cpu",
            "allocated_bytes": held,
            "active_bytes": held,
            "reserved_bytes": NONE,
            "host_rss_bytes": NONE,
        }
    )
    for key in op.frees:
        row = alive.pop(key)
        rows.storages[row]["freed_op_id"] = op_id
        _add_event(rows, "free", row, kept[key], op_id)


def _add_event(rows: _Rows, action: str, row: int, storage: Storage, op_id: int) -> None:
    rows.events.append(
        {
            "index": len(rows.events),
            "time_us": float(len(rows.events)),
            "device": "cpu",
            "action": action,
            "address": 0x1000 * (row + 1),
            "size_bytes": storage.size if storage.requested is None else storage.requested,
            "op_id": op_id,
            "stack_id": NONE,
        }
    )


def _add_calls(
    rows: _Rows,
    named: Sequence[Module],
    ops: Sequence[Op],
    step: int,
    first: int,
    module_ids: Mapping[str | None, int],
) -> None:
    """Adds a call for every run of neighbouring forward (or recomputed) operators inside a module."""
    open_calls: dict[str, dict[str, Any]] = {}
    for position, op in enumerate(ops):
        is_inside = op.module is not None and (op.phase == "forward" or op.is_recompute)
        path = _path(op.module) if is_inside and op.module is not None else []
        for name in [name for name in open_calls if name not in path]:
            del open_calls[name]
        for name in path:
            if name not in open_calls:
                parent = _parent(name)
                open_calls[name] = {
                    "module_call_id": len(rows.calls),
                    "module_id": module_ids[name],
                    "parent_call_id": NONE if parent is None else open_calls[parent]["module_call_id"],
                    "step": step,
                    "first_op_id": first + position,
                    "last_op_id": first + position,
                    "is_recompute": op.is_recompute,
                }
                rows.calls.append(open_calls[name])
            open_calls[name]["last_op_id"] = first + position


def _path(name: str) -> list[str]:
    """Returns the module's name and those around it, the root first."""
    parent = _parent(name)
    return [name] if parent is None else [*_path(parent), name]
