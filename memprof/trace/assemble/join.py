"""Appends the part recorded after the window to the window: one trace with a gap between the two parts.

All that is known about the gap is what is alive after it. Two rows represent it, in a step that was not recorded:
the first frees everything alive at the end of the first part, the second creates everything alive at the start of
the second part. A storage that spans the gap thus becomes two, each counted only in the steps of its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from memprof.trace.assemble.texts import as_texts
from memprof.trace.schema import (
    NONE,
    NOT_RECORDED,
    AllocatorEvents,
    Floats,
    Holders,
    Ints,
    Memory,
    ModuleCalls,
    Ops,
    OutOfMemory,
    Saved,
    Stacks,
    Steps,
    Storages,
    Table,
    Uses,
)

T = TypeVar("T", bound=Table)
Tables = dict[type[Table], Table]

_GAP_ROWS = 2
_OF_OPS = (
    "op_id",
    "first_op_id",
    "last_op_id",
    "forward_op_id",
    "created_op_id",
    "freed_op_id",
    "held_op_id",
    "released_op_id",
)


def join(first: Mapping[type[Table], Table], second: Mapping[type[Table], Table]) -> Tables:
    """Joins the tables of two parts of one process's recording, both for the same device.

    Tables that cover the whole process come from the first part: models, optimizers, device samples.

    Args:
        first: The earlier part.
        second: The later one; it has at least one recorded step.

    Returns:
        The joined tables.
    """
    parts = _Parts(first, second)
    ops, later_ops = parts.of(Ops)
    gap_step = max(int(later_ops.step[0]) - 1, 0)
    gap_us = np.array([ops.start_us[-1] if len(ops) else later_ops.start_us[0], later_ops.start_us[0]])
    gap = Ops.of(
        op_id=len(ops) + np.arange(_GAP_ROWS),
        step=[gap_step] * _GAP_ROWS,
        phase=as_texts(["other"] * _GAP_ROWS),
        name=as_texts([NOT_RECORDED] * _GAP_ROWS),
        kind=as_texts(["allocation"] * _GAP_ROWS),
        start_us=gap_us,
    )
    storages, later_storages = parts.of(Storages)
    ended = np.where(storages.freed_op_id == NONE, gap.op_id[0], storages.freed_op_id)
    made = np.where(later_storages.created_op_id == NONE, gap.op_id[1], later_storages.created_op_id)
    calls, later_calls = parts.of(ModuleCalls)
    moved = later_calls.replace(parent_call_id=_moved(later_calls.parent_call_id, len(calls)))
    return {
        **first,
        Ops: Ops.joined([ops, gap, later_ops]),
        Storages: _numbered(
            [storages.replace(freed_op_id=ended), later_storages.replace(created_op_id=made)], "storage_id"
        ),
        Uses: Uses.joined(parts.of(Uses)),
        Saved: Saved.joined(parts.of(Saved)),
        Memory: Memory.joined(parts.of(Memory)),
        ModuleCalls: _numbered([calls, moved], "module_call_id"),
        AllocatorEvents: _numbered(parts.of(AllocatorEvents), "index"),
        Holders: parts.first(Holders),
        OutOfMemory: parts.failures(),
        Stacks: parts.stacks,
        Steps: _with_gap(parts.steps(), gap_step, gap_us),
    }


class _Parts:
    """Two parts, with the id offsets of the second."""

    def __init__(self, first: Mapping[type[Table], Table], second: Mapping[type[Table], Table]) -> None:
        self._first, self._second = first, second
        self._ops = len(_table(first, Ops)) + _GAP_ROWS
        self._storages = len(_table(first, Storages))
        known: dict[str, int] = {}
        rows = [
            np.array(
                [known.setdefault(str(text), len(known)) for text in _table(part, Stacks).frames] + [NONE],
                dtype=np.int64,
            )
            for part in (first, second)
        ]
        self._first_stack_rows, self._second_stack_rows = rows
        self.stacks = Stacks.of(stack_id=np.arange(len(known)), frames=as_texts(list(known)))

    def first(self, kind: type[T]) -> T:
        """Returns a table of the first part."""
        return _with_stacks(_table(self._first, kind), self._first_stack_rows)

    def of(self, kind: type[T]) -> tuple[T, T]:
        """Returns a table of both parts, the ids of the second shifted past those of the first."""
        table = _table(self._second, kind)
        columns = {name: _moved(getattr(table, name), self._ops) for name in _OF_OPS if hasattr(table, name)}
        if hasattr(table, "storage_id"):
            columns["storage_id"] = _moved(table.storage_id, self._storages)
        return self.first(kind), _with_stacks(table.replace(**columns), self._second_stack_rows)

    def failures(self) -> OutOfMemory:
        """Returns the failed requests, each from the part in which its operator ran."""
        first, second = self.of(OutOfMemory)
        both = OutOfMemory.joined([first, second])
        rows = np.arange(len(first))
        return both.take(np.where((second.op_id != NONE) & (first.op_id == NONE), rows + len(first), rows))

    def steps(self) -> Steps:
        """Returns the steps; both parts list all steps, each with the operators recorded in that part."""
        first, second = self.of(Steps)
        held = dict(zip(second.step.tolist(), range(len(second)), strict=True))
        rows = [
            len(first) + held[step] if step in held and second.first_op_id[held[step]] != NONE else row
            for row, step in enumerate(first.step.tolist())
        ]
        return Steps.joined([first, second]).take(np.array(rows, dtype=np.int64))


def _table(part: Mapping[type[Table], Table], kind: type[T]) -> T:
    table = part[kind]
    assert isinstance(table, kind)
    return table


def _with_gap(steps: Steps, number: int, gap_us: Floats) -> Steps:
    """Adds the step that represents the gap, if it is missing."""
    if number in steps.step.tolist():
        return steps
    gap = Steps.of(
        step=[number],
        kind=as_texts(["skipped"]),
        start_us=gap_us[:1],
        duration_us=[np.nan],
        is_complete=[True],
    )
    both = Steps.joined([steps, gap])
    return both.take(np.argsort(both.step, kind="stable"))


def _moved(ids: Ints, by: int) -> Ints:
    return np.where(ids == NONE, NONE, ids + by)


def _with_stacks(table: T, rows: Ints) -> T:
    return table.replace(stack_id=rows[table.stack_id]) if hasattr(table, "stack_id") else table


def _numbered(tables: Sequence[T], name: str) -> T:
    both = type(tables[0]).joined(tables)
    return both.replace(**{name: np.arange(len(both))})
