"""Live bytes over a whole recording of any size: exact totals, and the composition at any point."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memprof.trace.files.coded import Coded
from memprof.trace.schema import CATEGORIES, NONE, Bools, Ints, Ops, Storages
from memprof.trace.store import Trace

Ids = npt.NDArray[np.int32]
Codes = npt.NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class _Kind:
    """Births and deaths of one category's storages, each ordered by operator, with running sums."""

    born_at: Ids
    born_bytes: Ints
    freed_at: Ids
    freed_bytes: Ints

    def alive(self, op_ids: Ints) -> Ints:
        """Returns the live bytes during some operators, including storages they make and those freed right after."""
        born = np.searchsorted(self.born_at, op_ids, side="right")
        freed = np.searchsorted(self.freed_at, op_ids, side="left")
        alive: Ints = self.born_bytes[born] - self.freed_bytes[freed]
        return alive


class History:
    """Live storages during every operator of a recording.

    Built from a few columns of the recording, stored compactly: ten million births and deaths take about 300 MB.
    Positions are rows of the recording's operators.

    Attributes:
        ops: Number of operators.
        total: Allocated bytes during each operator, workspace included, shape ``(ops,)``: equal to
            ``replay.live.live_bytes(step).during`` in every step.
        phase: Phase of each operator, as an index into ``phases``.
        phases: Names of the phases that occur.
        runs_again: Whether each operator is a recompute.
        step: Step of each operator.
        module: Module of each operator, NONE outside of modules.
        categories: Non-empty categories, in the schema's order.
        created: Operator that made each storage, NONE for those live before.
        freed: Operator after which each storage was freed, NONE for those live at the end.
        size: Allocated bytes of each storage.
        category: Category of each storage, as an index into ``storage_categories``.
        storage_categories: Names of the categories that occur among storages.
        owner: Module of each storage, NONE outside of modules.
    """

    def __init__(self, trace: Trace) -> None:
        """Reads the columns it needs from a recording.

        Raises:
            BadInputError: The recording is damaged.
        """
        # One column at a time: as read, each takes at least twice its stored size.
        self.step: Ids = trace.columns(Ops, "step")["step"].astype(np.int32)
        self.ops = len(self.step)
        self.module: Ids = trace.columns(Ops, "module_id")["module_id"].astype(np.int32)
        phase: Coded = trace.columns(Ops, "phase")["phase"]
        self.phases: tuple[str, ...] = tuple(phase.distinct)
        self.phase: Codes = phase.codes.astype(np.int8)
        self.runs_again: Bools = trace.columns(Ops, "is_recompute")["is_recompute"]
        workspace: Ints = trace.columns(Ops, "workspace_bytes")["workspace_bytes"]
        self._workspace: npt.NDArray[np.integer] = workspace
        if np.abs(workspace).max(initial=0) < 2**31:
            self._workspace = workspace.astype(np.int32)
        self.size: Ints = trace.columns(Storages, "allocated_bytes")["allocated_bytes"]
        self.created: Ids = trace.columns(Storages, "created_op_id")["created_op_id"].astype(np.int32)
        self.freed: Ids = trace.columns(Storages, "freed_op_id")["freed_op_id"].astype(np.int32)
        self.owner: Ids = trace.columns(Storages, "module_id")["module_id"].astype(np.int32)
        category: Coded = trace.columns(Storages, "category")["category"]
        self.storage_categories: tuple[str, ...] = tuple(category.distinct)
        self.category: Codes = category.codes.astype(np.int8)
        del phase, workspace, category
        self._by_category = self._split()
        known = [name for name in CATEGORIES if name in self._by_category or name == "workspace"]
        self.categories: tuple[str, ...] = (*known, *sorted(self._by_category.keys() - set(known)))
        if not self._workspace.any() and "workspace" not in self._by_category:
            self.categories = tuple(name for name in self.categories if name != "workspace")
        self.total: Ints = self._during(self.created, self.freed, self.size) + self._workspace

    def alive_bytes(self, category: str, op_ids: Ints) -> Ints:
        """Returns the live bytes of a category during some operators; over all categories they sum to ``total``."""
        kind = self._by_category.get(category)
        alive = np.zeros(len(op_ids), dtype=np.int64) if kind is None else kind.alive(op_ids)
        return alive + self._workspace[op_ids] if category == "workspace" else alive

    def alive(self, op_id: int) -> Ints:
        """Returns the rows of the storages live during an operator."""
        is_alive: Bools = self.created <= op_id
        is_alive &= (self.freed == NONE) | (self.freed >= op_id)
        return np.flatnonzero(is_alive)

    def bytes_of(self, is_chosen: Bools) -> Ints:
        """Returns the live bytes of some storages during each operator, shape ``(ops,)``.

        Args:
            is_chosen: Which storages, shape ``(storages,)``.
        """
        return self._during(self.created[is_chosen], self.freed[is_chosen], self.size[is_chosen])

    def workspace(self, op_id: int) -> int:
        """Returns the workspace of an operator."""
        return int(self._workspace[op_id])

    def peak(self, first: int = 0, end: int | None = None) -> int:
        """Returns the first operator of a range with the peak live bytes."""
        return first + int(self.total[first:end].argmax())

    def _split(self) -> dict[str, _Kind]:
        kinds = {}
        for code, name in enumerate(self.storage_categories):
            rows = np.flatnonzero(self.category == code).astype(np.int32)
            if len(rows):
                ended = rows[self.freed[rows] != NONE]
                kinds[name] = _Kind(*self._running(rows, self.created), *self._running(ended, self.freed))
        return kinds

    def _running(self, rows: Ids, moments: Ids) -> tuple[Ids, Ints]:
        """Returns the times of some storages' births or deaths, in order, and the cumulative bytes before each."""
        at = moments[rows]
        if np.any(at[1:] < at[:-1]):
            order = np.argsort(at, kind="stable")
            at, rows = at[order], rows[order]
        sums = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(self.size[rows], out=sums[1:])
        return at, sums

    def _during(self, created: Ids, freed: Ids, size: Ints) -> Ints:
        """Returns the live bytes during each operator, including storages it makes and those freed right after."""
        change = np.zeros(self.ops + 1, dtype=np.int64)  # the last entry: never freed
        np.add.at(change, np.maximum(created, 0), size)
        np.subtract.at(change, np.where(freed == NONE, self.ops, freed + 1), size)
        alive: Ints = np.cumsum(change[:-1], out=change[:-1])
        return alive
