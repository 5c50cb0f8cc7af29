"""Invariants of a recording's tables, checked once, when a table is read from a file.

Ids are dense, so checking a reference needs only the row count of the table it points into, which the file's
manifest gives: every table is checked on its own, in whatever order tables are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memprof.phases import MOST_NAMES, is_own_name
from memprof.trace.files.coded import Coded
from memprof.trace.schema import (
    MOST_REQUESTED_BYTES,
    NONE,
    RANK_TABLES,
    AllocatorEvents,
    Column,
    Memory,
    ModuleCalls,
    ModulePeaks,
    Modules,
    Ops,
    OutOfMemory,
    Saved,
    Stacks,
    StepPeaks,
    Steps,
    Storages,
    Table,
    Uses,
)

#: Columns that number the rows of their table: 0, 1, 2 ...
_DENSE: dict[type[Table], str] = {
    Modules: "module_id",
    ModuleCalls: "module_call_id",
    Ops: "op_id",
    Storages: "storage_id",
    Stacks: "stack_id",
}

#: The table that each id points into.
_TARGETS: dict[str, type[Table]] = {
    "module_id": Modules,
    "parent_id": Modules,
    "parent_call_id": ModuleCalls,
    "op_id": Ops,
    "first_op_id": Ops,
    "last_op_id": Ops,
    "forward_op_id": Ops,
    "created_op_id": Ops,
    "freed_op_id": Ops,
    "held_op_id": Ops,
    "released_op_id": Ops,
    "stack_id": Stacks,
    "storage_id": Storages,
}
_POINTING = (Modules, ModuleCalls, Steps, Ops, Storages, Uses, Saved, Memory, StepPeaks, ModulePeaks)
#: The operators and stacks of a failed request may lie in a part that was not kept.
_ALSO_POINTING = ((OutOfMemory, "module_id"),)

#: Ids that must not be missing.
_NEEDED: dict[type[Table], tuple[str, ...]] = {
    ModuleCalls: ("module_id",),
    Uses: ("op_id", "storage_id"),
    Saved: ("storage_id", "forward_op_id"),
    Memory: ("op_id",),
}

#: Enumerations that must not be missing.
_TOLD: dict[type[Table], tuple[str, ...]] = {
    Steps: ("kind",),
    Ops: ("phase", "kind"),
    Storages: ("category",),
    Uses: ("role",),
    AllocatorEvents: ("action",),
}

#: Ids that must point to an earlier row.
_EARLIER: dict[type[Table], tuple[str, str]] = {
    Ops: ("forward_op_id", "is of a forward operator that comes after it"),
    ModuleCalls: ("parent_call_id", "is inside a call that comes after it"),
}

#: Tables whose column ``step`` must be among the steps.
STEPPED = (Ops, ModuleCalls)

#: Pairs of columns where the first must not exceed the second, if both are present.
_ORDERED: dict[type[Table], tuple[tuple[str, str, str], ...]] = {
    Steps: (("first_op_id", "last_op_id", "ends with an operator before its first"),),
    ModuleCalls: (("first_op_id", "last_op_id", "ends with an operator before its first"),),
    Storages: (("created_op_id", "freed_op_id", "is freed before it is made"),),
    Saved: (("forward_op_id", "released_op_id", "is released before it is saved"),),
}

#: Columns used as indices or summed: none may be negative. Workspace bytes may be, and with them the
#: counters of a step (table memory), as may streams and addresses.
_SIGNED = ("workspace_bytes", "stream", "address")
#: Limit on values, so that their sums fit in 63 bits with room to spare.
_MOST_BYTES = float(MOST_REQUESTED_BYTES)
#: Limit on the number of a step, a micro-batch or an operation.
_MOST_COUNT = 2**53
#: Latest time (Unix time of the year 33,000), and longest duration.
_MOST_US = 1e18
#: Limit on the length of a text: the longest are Python stacks.
_MOST_TEXT = 1 << 20


@dataclass(eq=False)  # not frozen: Python notes the traceback in it
class InvariantError(Exception):
    """A row of a table violates an invariant of recordings.

    Attributes:
        detail: A clause, such as "table storages, row 17: module_id 912 does not exist".
    """

    detail: str

    def __str__(self) -> str:
        """Returns the clause."""
        return self.detail


@dataclass(frozen=True)
class Checker:
    """Checks the tables of one process.

    Attributes:
        rows: Row count of each of the process's tables, from the file; a missing table has none.
        step_numbers: Reads the numbers of the process's steps.
    """

    rows: Callable[[type[Table]], int]
    step_numbers: Callable[[], Any]

    def check(self, kind: type[Table], columns: Mapping[str, Any]) -> None:
        """Checks columns read from a table.

        Args:
            kind: The table.
            columns: The columns that were read, by name: numpy arrays, or ``Coded`` for texts.

        Raises:
            InvariantError: Names the first row that violates an invariant.
        """
        for column in kind.columns():
            if column.name in columns:
                self._check_column(kind, column, columns[column.name])
        self._check_rows(kind, columns)

    def _check_rows(self, kind: type[Table], columns: Mapping[str, Any]) -> None:
        """Checks invariants across columns, and the order of rows."""
        dense = _DENSE.get(kind, "")
        if dense in columns:
            ids = columns[dense]
            holds = ids == np.arange(len(ids))
            _require(kind, holds, lambda row: f"{dense} is {ids[row]}, and rows are numbered from 0")
        for low, high, broken in _ORDERED.get(kind, ()):
            if low in columns and high in columns:
                first, last = columns[low], columns[high]
                _require(kind, (first == NONE) | (last == NONE) | (first <= last), f"it {broken}")
        if kind is Modules and "parent_id" in columns:
            _require(kind, _has_root(columns["parent_id"]), "it is held by itself, in a circle")
        if kind in _EARLIER and _EARLIER[kind][0] in columns:
            name, words = _EARLIER[kind]
            _require(kind, columns[name] < np.arange(len(columns[name])), f"it {words}")
        if kind is Steps and "step" in columns:
            numbers = columns["step"]
            is_first = np.isin(np.arange(len(numbers)), np.unique(numbers, return_index=True)[1])
            _require(kind, is_first, lambda row: f"step {numbers[row]} is listed twice")
        if kind in STEPPED and "step" in columns:
            steps = columns["step"]
            holds = np.isin(steps, self.step_numbers())
            _require(kind, holds, lambda row: f"step {steps[row]} is not among the steps")

    def _check_column(self, kind: type[Table], column: Column, values: Any) -> None:
        name = column.name
        if column.kind == "text":
            _check_texts(kind, column, values)
        elif column.kind == "float":
            holds = np.isnan(values) | (np.abs(values) <= _MOST_US)
            _require(kind, holds, lambda row: f"{name} is {values[row]:g}")
        elif name in _TARGETS and (kind in _POINTING or (kind, name) in _ALSO_POINTING):
            self._check_ids(kind, name, values)
        elif column.kind in ("id", "int") and name not in _SIGNED:
            lowest = -_MOST_COUNT if kind is Memory else NONE if column.kind == "id" else 0
            most = _MOST_BYTES if name.endswith("_bytes") else _MOST_COUNT
            holds = (values >= lowest) & (values <= most)
            _require(kind, holds, lambda row: f"{name} is {values[row]:,}")
        if name.endswith("_bytes"):
            _require_sum(kind, name, values)

    def _check_ids(self, kind: type[Table], name: str, ids: Any) -> None:
        is_needed = name in _NEEDED.get(kind, ())
        count = self.rows(_TARGETS[name])
        holds = (ids >= (0 if is_needed else NONE)) & (ids < count)
        _require(
            kind, holds, lambda row: f"{name} is missing" if ids[row] == NONE else f"{name} {ids[row]} does not exist"
        )


def checked_with(kind: type[Table], name: str) -> set[str]:
    """Returns the columns that are checked when one is read, itself included: the steps of all operators that are."""
    pairs = [(low, high) for low, high, _ in _ORDERED.get(kind, ()) if name in (low, high)]
    return {name, *(("step",) if (kind, name) == (Ops, "op_id") else ())}.union(*pairs)


def check_tables(tables: Mapping[type[Table], Table]) -> None:
    """Checks the tables of one process that were built in memory, except their texts.

    Raises:
        InvariantError: Names the first row that violates an invariant.
    """
    steps = tables.get(Steps)
    checker = Checker(
        rows=lambda kind: len(tables[kind]) if kind in tables else 0,
        step_numbers=lambda: steps.step if isinstance(steps, Steps) else (),
    )
    for kind, table in tables.items():
        checker.check(
            kind, {column.name: getattr(table, column.name) for column in kind.columns() if column.kind != "text"}
        )


def _has_root(parents: Any) -> Any:
    """Returns which rows lead to one without a parent; each pass doubles the distance climbed."""
    up = np.append(parents, NONE)  # NONE, -1, indexes the last entry, which points to itself
    for _ in range(len(parents).bit_length()):
        up = up[up]
    return up[:-1] == NONE


def _check_texts(kind: type[Table], column: Column, texts: Coded) -> None:
    distinct = texts.distinct
    allowed = {*column.values, *(() if column.name in _TOLD.get(kind, ()) else ("",))}
    own = {text for text in distinct.tolist() if text and text not in allowed} if column.is_open else set()
    if len(own) > MOST_NAMES and kind not in RANK_TABLES:  # in summaries of many ranks, each has its own
        raise InvariantError(f"table {kind.table_name}: {column.name} has {len(own):,} names of the job's own")
    allowed |= {text for text in own if is_own_name(text)}
    wrong = [
        place
        for place, text in enumerate(distinct.tolist())
        if len(text) > _MOST_TEXT or (column.values and text not in allowed)
    ]
    if not wrong:
        return
    rows = np.flatnonzero(np.isin(texts.codes, wrong))
    if len(rows):
        text = str(distinct[texts.codes[rows[0]]])
        _fail(kind, int(rows[0]), _what_is_wrong(column.name, text))


def _what_is_wrong(name: str, text: str) -> str:
    if not text:
        return f"{name} is missing"
    if len(text) > 80:
        return f"{name} is a text of {len(text):,} letters"
    return f"unknown {name} {text!r}"


def _require_sum(kind: type[Table], name: str, values: Any) -> None:
    """Checks that all bytes together fit, since totals are sums; requests that failed are in no total."""
    if (kind, name) == (OutOfMemory, "requested_bytes"):
        return
    if len(values) and float(np.abs(values, dtype=np.float64).sum()) > _MOST_BYTES:
        raise InvariantError(f"table {kind.table_name}: {name} sums to more than 2**60")


def _require(kind: type[Table], holds: Any, words: str | Callable[[int], str]) -> None:
    if not holds.all():
        row = int(np.flatnonzero(~holds)[0])
        _fail(kind, row, words if isinstance(words, str) else words(row))


def _fail(kind: type[Table], row: int, words: str) -> None:
    raise InvariantError(f"table {kind.table_name}, row {row}: {words}")
