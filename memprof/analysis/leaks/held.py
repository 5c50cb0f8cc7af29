"""What holds the storages that stay: a variable, or the autograd graph of one, by the recorder's statements."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from memprof.analysis.leaks.leak import HeldBy, held_by, variable_of
from memprof.analysis.report.sources import Sources
from memprof.trace.schema import NONE, Holders, Ints, Storages, Uses
from memprof.trace.store import Trace


class Held:
    """Looks up what holds storages."""

    def __init__(self, trace: Trace, sources: Sources, steps_of: Ints, last_step: int) -> None:
        holders = trace.table(Holders)
        # Others are not looked up for growth, or not in these steps.
        is_own = ((holders.tensors > 0) | holders.is_by_graph) & (holders.step <= last_step + 1)
        holders = holders.take(is_own)
        self._holders, self._by_graph = holders.take(~holders.is_by_graph), holders.take(holders.is_by_graph)
        self._sources, self._steps_of = sources, steps_of
        self._trace = trace
        self._origins: dict[int, set[int]] = {}

    @cached_property
    def _uses(self) -> Uses:
        return self._trace.table(Uses)

    @cached_property
    def _written(self) -> Uses:
        """Uses that write, by storage."""
        written = self._uses.take(self._uses.role != "read")
        return written.take(np.argsort(written.storage_id, kind="stable"))

    def of(self, storages: Storages, some: list[int]) -> HeldBy | None:
        """Returns what holds some storages: a variable, else the graph that they are in."""
        holders = self._holders
        is_known = holders.chain != ""
        rows = np.flatnonzero(np.isin(holders.storage_id, storages.storage_id[some]) & is_known)
        if len(rows):
            return held_by(holders, int(rows[0]), self._sources, is_by_graph=False)
        rows = np.flatnonzero(np.isin(self._by_graph.storage_id, storages.storage_id[some]))
        if len(rows):
            row = self._of_several_steps(self._by_graph, rows.tolist())
            return None if row == NONE else held_by(self._by_graph, row, self._sources, is_by_graph=True)
        return None

    def _of_several_steps(self, holders: Holders, rows: list[int]) -> int:
        """Returns the first row of a variable whose graphs are of several steps, NONE if there is none.

        The graph of the latest output is of one step, and keeps nothing of those before.
        """
        seen: dict[str, set[int]] = {}
        for row in rows:
            step = int(self._steps_of[int(holders.storage_id[row])])
            seen.setdefault(variable_of(holders.chain[row]), set()).add(step)
        return next((row for row in rows if len(seen[variable_of(holders.chain[row])]) > 1), NONE)

    def of_elsewhere(self, sizes: list[int]) -> tuple[HeldBy | None, str, str]:
        """Returns what holds memory that another thread took: tensors of no recorded storage that make up a step's.

        Args:
            sizes: Bytes of each step.

        Returns:
            The holder, None if unknown or if there are several, and the tensors' shape and element type.
        """
        holders = self._holders
        unseen = (holders.storage_id == NONE) & (holders.chain != "")
        rows = np.flatnonzero(unseen & (holders.total_bytes == np.median(sizes) * holders.tensors))
        if len({variable_of(holders.chain[row]) for row in rows}) != 1:
            return None, "", ""
        row = int(rows[0])
        held = held_by(holders, row, self._sources, is_by_graph=False)
        return held, str(holders.shape[row]), str(holders.dtype[row])

    def origins_of(self, storage_id: int) -> set[int]:
        """Returns the storages that a storage was computed from, back to the first of earlier steps."""
        if storage_id in self._origins:
            return self._origins[storage_id]
        found, step = {storage_id}, self._steps_of[storage_id]
        waiting = [storage_id]
        while waiting:
            storage = waiting.pop()
            writers = slice(*np.searchsorted(self._written.storage_id, [storage, storage + 1]).tolist())
            for op in self._written.op_id[writers].tolist():
                own = slice(*np.searchsorted(self._uses.op_id, [op, op + 1]).tolist())
                for used in self._uses.storage_id[own].tolist():
                    if used not in found and used < len(self._steps_of):
                        found.add(used)
                        if self._steps_of[used] == step:
                            waiting.append(used)
        self._origins[storage_id] = found
        return found
