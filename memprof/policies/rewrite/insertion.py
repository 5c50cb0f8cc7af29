"""Operators to insert into a draft, emitted in the order in which the code would run them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from memprof.policies.rewrite.draft import Draft
from memprof.trace.schema import NONE, Ints, Ops, Storages, Uses
from memprof.trace.step import Step

#: Columns of the rows of operators: where they are inserted, and what is said of them.
_OP_COLUMNS = (
    *("like", "before", "name", "duration_us", "workspace_bytes", "forward_op_id", "module_id", "kind", "flops"),
    "mutates",
)


class Insertion:
    """Operators and storages to insert; their ids in the draft are known at once.

    Nothing else may be inserted into the draft between the first of them and ``write``.

    Attributes:
        duration_us: How long the operators take together.
    """

    def __init__(self, draft: Draft) -> None:
        self.duration_us = 0.0
        self._draft = draft
        self._first_op = len(draft.ops)
        self._first_storage = len(draft.storages)
        self._ops: list[tuple[Any, ...]] = []  # a row each, of the columns in _OP_COLUMNS
        self._storages: dict[str, list[Any]] = defaultdict(list)
        self._use_op_ids: list[int] = []
        self._use_storage_ids: list[int] = []
        self._use_roles: list[str] = []
        self._given: dict[str, dict[int, Any]] = defaultdict(dict)

    def op(
        self,
        name: str,
        *,
        like: int,
        before: int,
        reads: Iterable[int] = (),
        mutates: Iterable[int] = (),
        writes: Iterable[int] = (),
        duration_us: float = 0.0,
        workspace_bytes: int = 0,
        forward_op_id: int = NONE,
        module_id: int = NONE,
        kind: str = "compute",
        flops: int = 0,
        columns: Mapping[str, Any] | None = None,
    ) -> int:
        """Writes down an operator.

        Args:
            name: Its name.
            like: Operator of the draft whose phase, step, micro-batch, stream and stack it has.
            before: Operator of the original step before which it runs.
            reads: Storages it reads.
            mutates: Storages it changes.
            writes: Storages it makes.
            duration_us: How long it takes.
            workspace_bytes: Temporaries inside it.
            forward_op_id: The forward operator it belongs to.
            module_id: The module it belongs to.
            kind: compute, copy or allocation.
            flops: Floating point operations.
            columns: Other columns, in place of those of ``like`` or of what its uses add up to.

        Returns:
            Its id in the draft.
        """
        number = len(self._ops)
        op_id = self._first_op + number
        for column, value in (columns or {}).items():
            self._given[column][number] = value
        reads, mutates, writes = list(reads), list(mutates), list(writes)
        self._ops.append(
            (like, before, name, duration_us, workspace_bytes, forward_op_id, module_id, kind, flops, bool(mutates))
        )
        self._use_storage_ids += (*reads, *mutates, *writes)
        self._use_roles += ("read",) * len(reads) + ("mutate",) * len(mutates) + ("write",) * len(writes)
        self._use_op_ids += (op_id,) * (len(reads) + len(mutates) + len(writes))
        self.duration_us += duration_us
        return op_id

    def storage(self, allocated_bytes: int, created_op_id: int, freed_op_id: int = NONE, **texts: Any) -> int:
        """Writes down a storage, temporary and nameless where nothing else is said; returns its id in the draft."""
        columns = self._storages
        columns["requested_bytes"].append(allocated_bytes)
        columns["allocated_bytes"].append(allocated_bytes)
        columns["created_op_id"].append(created_op_id)
        columns["freed_op_id"].append(freed_op_id)
        columns["category"].append(texts.pop("category", "temporary"))
        columns["module_id"].append(texts.pop("module_id", NONE))
        for name in ("name", "shape", "dtype", "device"):
            columns[name].append(texts.pop(name, ""))
        if texts:
            raise TypeError(f"a storage has no {', '.join(texts)}")
        return self._first_storage + len(columns["freed_op_id"]) - 1

    def storages(self, rows: Storages) -> Ints:
        """Writes down storages; returns their ids in the draft. Shape (rows,)."""
        first = self.next_storage
        for name in (column.name for column in Storages.columns() if column.name != "storage_id"):
            self._storages[name] += getattr(rows, name).tolist()
        return np.arange(first, self.next_storage)

    def use(self, op: int, storage: int, role: str) -> None:
        """Writes down a use."""
        self._use_op_ids.append(op)
        self._use_storage_ids.append(storage)
        self._use_roles.append(role)

    @property
    def next_storage(self) -> int:
        """Id the next storage will have."""
        return self._first_storage + len(self._storages["freed_op_id"])

    def free(self, storage: int, after: int) -> None:
        """Says after which operator a storage written down before is freed."""
        self._storages["freed_op_id"][storage - self._first_storage] = after

    def write(self) -> Ints:
        """Inserts everything into the draft; returns the ids of the operators."""
        draft = self._draft
        count = len(self._ops)
        columns = dict(zip(_OP_COLUMNS, zip(*self._ops, strict=True), strict=True)) if count else {}
        like, before = (np.asarray(columns.pop(name, ()), dtype=np.int64) for name in ("like", "before"))
        uses = Uses.of(op_id=self._use_op_ids, storage_id=self._use_storage_ids, role=self._use_roles)
        sizes = np.zeros(len(draft.storages) + len(self._storages["freed_op_id"]), dtype=np.int64)
        sizes[: len(draft.storages)] = draft.storages.allocated_bytes
        sizes[len(draft.storages) :] = self._storages["allocated_bytes"]
        read_bytes, written_bytes = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        is_read, is_written = uses.role != "write", uses.role != "read"
        np.add.at(read_bytes, uses.op_id[is_read] - self._first_op, sizes[uses.storage_id[is_read]])
        np.add.at(written_bytes, uses.op_id[is_written] - self._first_op, sizes[uses.storage_id[is_written]])
        model = draft.ops.take(like)
        rows = model.replace(
            start_us=np.full(count, np.nan),
            is_recompute=np.zeros(count, dtype=np.bool_),
            uses_rng=np.zeros(count, dtype=np.bool_),
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            **{
                column.name: np.asarray(columns[column.name], dtype=column.dtype)
                for column in Ops.columns()
                if column.name in columns
            },
        )
        for name, given in self._given.items():
            values = getattr(rows, name).copy()
            values[list(given)] = list(given.values())
            rows = rows.replace(**{name: values})
        ids = draft.insert_ops(rows, before)
        if self._storages["freed_op_id"]:
            devices = draft.storages.device[draft.storages.allocated_bytes > 0]
            device = devices[0] if len(devices) else "cpu"
            self._storages["device"] = [text or device for text in self._storages["device"]]
            draft.insert_storages(Storages.of(**self._storages))
        draft.insert_uses(uses)
        return ids


#: Names of the copies that policies and schedules insert: to host memory or disk, back, and into 8 bits.
SWAP_OUT, SWAP_IN, COMPRESS = "memprof.swap_out", "memprof.swap_in", "memprof.compress"


def new_ops(step: Step, name: str, before: Ints, *, kind: str = "compute", **columns: Any) -> Ops:
    """Returns rows for ``Draft.insert_ops``, in the phase, micro-batch and time of the operators that they precede.

    Args:
        step: The step.
        name: The name of all of them.
        before: Operators before which they run; the number of operators for the end of the step.
        kind: Their kind.
        columns: Further columns, each of shape ``(rows,)``; the others have their missing values.
    """
    beside = np.clip(before, 0, max(len(step.ops) - 1, 0))
    return Ops.of(
        op_id=np.arange(len(before)),
        step=step.ops.step[beside],
        micro_batch=step.ops.micro_batch[beside],
        phase=step.ops.phase[beside],
        name=np.full(len(before), name),
        kind=np.full(len(before), kind),
        start_us=step.ops.start_us[beside],
        **columns,
    )
