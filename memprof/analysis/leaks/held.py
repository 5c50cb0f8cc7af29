"""What holds the storages that stay: a variable, or the autograd graph of one, by the recorder's statements."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property
from itertools import combinations

import numpy as np

from memprof.analysis.leaks.leak import HeldBy, describe_holder, held_by, variable_of
from memprof.analysis.report.sources import Sources, find_sources
from memprof.trace.schema import NONE, Holders, Ops, Stacks, Storages, Uses
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_count

#: Copies are worth a sentence from these bytes on.
_COPY_BYTES = 16 * 2**20


class Held:
    """Looks up what holds storages."""

    def __init__(self, trace: Trace, sources: Sources, storages: Storages, last_step: int) -> None:
        holders = trace.table(Holders)
        # Others are not looked up for growth, or not in these steps.
        is_own = ((holders.tensors > 0) | holders.is_by_graph) & (holders.step <= last_step + 1)
        holders = holders.take(is_own)
        self._holders, self._by_graph = holders.take(~holders.is_by_graph), holders.take(holders.is_by_graph)
        self._sources, self._storages = sources, storages
        self._trace = trace
        self._origins: dict[int, set[int]] = {}

    def _step_of(self, storage_id: int) -> int:
        return int(self._trace.table(Ops).step[self._storages.created_op_id[storage_id]])

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
            step = self._step_of(int(holders.storage_id[row]))
            seen.setdefault(variable_of(holders.chain[row]), set()).add(step)
        return next((row for row in rows if len(seen[variable_of(holders.chain[row])]) > 1), NONE)

    def of_elsewhere(self, sizes: list[int]) -> tuple[HeldBy | None, str, str]:
        """Returns what holds memory that another thread took: tensors of no recorded storage that make up a step's.

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
        found, step = {storage_id}, self._step_of(storage_id)
        waiting = [storage_id]
        while waiting:
            storage = waiting.pop()
            writers = slice(*np.searchsorted(self._written.storage_id, [storage, storage + 1]).tolist())
            for op in self._written.op_id[writers].tolist():
                own = slice(*np.searchsorted(self._uses.op_id, [op, op + 1]).tolist())
                for used in self._uses.storage_id[own].tolist():
                    if used not in found and used < len(self._storages):
                        found.add(used)
                        if self._step_of(used) == step:
                            waiting.append(used)
        self._origins[storage_id] = found
        return found


def describe_copies(trace: Trace) -> str:
    """Returns that two variables hold tensors of the same shapes in main memory, which training does not keep.

    Returns:
        A sentence on the pair of most bytes; "" where no two variables do.
    """
    holders = trace.table(Holders)
    idle = holders.take((holders.tensors == 0) & (holders.device == "cpu") & (holders.total_bytes > 0))
    groups: dict[str, list[int]] = {}
    for row in np.flatnonzero(idle.chain != "").tolist():
        groups.setdefault(variable_of(str(idle.chain[row])), []).append(row)
    kinds = {
        name: Counter((str(idle.shape[row]), str(idle.dtype[row]), int(idle.total_bytes[row])) for row in rows)
        for name, rows in groups.items()
    }
    common = [
        (sum(size * count for (*_, size), count in (one & other).items()), (one & other).total(), first, second)
        for (first, one), (second, other) in combinations(kinds.items(), 2)
    ]
    size, tensors, *names = max(common, key=lambda pair: pair[0], default=(0, 0, "", ""))
    if size < _COPY_BYTES:
        return ""
    sources = find_sources(trace.table(Stacks))
    first, second = (
        describe_holder(replace(held_by(idle, groups[name][0], sources, is_by_graph=False), chain=name))
        for name in names
    )
    return (
        f"{format_count(tensors, 'tensor')} of the same shapes ({format_bytes(size)}) are in main memory twice, held "
        f"by {first} and by {second}: both copies, as when what was offloaded or loaded is not dropped."
    )
