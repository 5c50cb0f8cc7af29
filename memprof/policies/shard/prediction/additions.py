"""Collects the operators and storages that sharding adds to a step, and inserts them at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from memprof.policies.rewrite.draft import Draft
from memprof.trace.schema import NONE, Ints, Ops, Storages, Uses
from memprof.trace.step import Step


class Additions:
    """Operators, storages and uses to be inserted into a draft; their ids are final from the start.

    Individual insertions would each copy the whole step.
    """

    def __init__(self, step: Step) -> None:
        """Starts empty; ids continue after the step's."""
        self._step = step
        self._operators: list[dict[str, Any]] = []
        self._places: list[tuple[int, int]] = []
        self._storages: list[Storages] = []
        self._next_storage = len(step.storages)
        self._freed: dict[int, int] = {}
        self._uses: list[tuple[int, int, str]] = []

    def operator(self, name: str, before: int, like: int, **columns: Any) -> int:
        """Adds an operator.

        Args:
            name: Its name.
            before: Operator of the step before which it runs.
            like: Operator of the step whose phase, module and micro-batch it copies.
            columns: Its other columns; the rest are 0.

        Returns:
            Its id.
        """
        self._operators.append({"name": name, **columns})
        self._places.append((before, like))
        return len(self._step.ops) + len(self._operators) - 1

    def storages(self, rows: Storages) -> Ints:
        """Adds storages; returns their ids."""
        self._storages.append(rows)
        first = self._next_storage
        self._next_storage += len(rows)
        return np.arange(first, self._next_storage)

    def storage(self, row: Storages) -> int:
        """Adds a storage; returns its id."""
        return int(self.storages(row)[0])

    def free(self, storage: int, op: int) -> None:
        """Frees an added storage after an operator."""
        self._freed[storage] = op

    def use(self, op: int, storage: int, role: str) -> None:
        """Adds a use."""
        self._uses.append((op, storage, role))

    def insert(self, draft: Draft) -> None:
        """Inserts everything, in order of addition."""
        if self._operators:
            before, like = (np.array(places) for places in zip(*self._places, strict=True))
            rows = self._step.ops.take(like)
            blank: dict[str, Any] = {
                "kind": "compute",
                "stream": 0,
                "duration_us": 0.0,
                "flops": 0,
                "read_bytes": 0,
                "written_bytes": 0,
                "workspace_bytes": 0,
                "forward_op_id": NONE,
                "uses_rng": False,
                "mutates": False,
                "is_recompute": False,
            }
            filled = [{**blank, **operator} for operator in self._operators]
            types = {column.name: column.dtype for column in Ops.columns()}
            new = {key: np.array([row[key] for row in filled], dtype=types[key]) for key in filled[0]}
            draft.insert_ops(rows.replace(**new), before)
        if self._storages:
            names = [field.name for field in dataclasses.fields(Storages)]
            joined = Storages(
                **{name: np.concatenate([getattr(rows, name) for rows in self._storages]) for name in names}
            )
            freed = joined.freed_op_id.copy()
            for storage, op in self._freed.items():
                freed[storage - len(self._step.storages)] = op
            draft.insert_storages(joined.replace(freed_op_id=freed))
        if self._uses:
            ops, storages, roles = zip(*self._uses, strict=True)
            draft.insert_uses(Uses.of(op_id=ops, storage_id=storages, role=roles))
