"""The tensors that stay from step to step: where they are made, since when they are kept, and what holds them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from memprof.analysis.leaks.growth import (
    LEAST_STEPS,
    Growth,
    StepEnds,
    find_step_ends,
    growth_of_run,
    is_rising,
    steady_rise,
)
from memprof.analysis.leaks.leak import HeldBy, Leak, held_by
from memprof.analysis.leaks.whole_run import leaks_of_run
from memprof.analysis.report.sources import Sources, find_sources
from memprof.json_values import inline
from memprof.trace.assemble.memory.elsewhere import NAME as ELSEWHERE
from memprof.trace.schema import NONE, Bools, Holders, Ints, Modules, Ops, Stacks, StepPeaks, Storages, Uses
from memprof.trace.store import Trace


@dataclass(frozen=True)
class LeakReport:
    """Growth, and the tensors that make it up, those that grow fastest first."""

    growth: Growth = field(metadata=inline())
    leaks: tuple[Leak, ...]

    @property
    def is_growing(self) -> bool:
        """Whether memory grows."""
        return bool(self.growth.bytes_per_step)


def find_leaks(trace: Trace) -> LeakReport:
    """Finds the tensors that make live memory grow.

    Args:
        trace: The recording of one rank.
    """
    run = growth_of_run(trace.table(StepPeaks))
    if run is not None:
        return LeakReport(run, _sorted(leaks_of_run(trace, run) if run.bytes_per_step else []))
    ends = find_step_ends(trace)
    count = 0 if ends is None else len(ends.steps)
    if ends is None or count < LEAST_STEPS:
        why = f"growth shows in {LEAST_STEPS} complete steps in a row; this recording has {count}."
        if not count:
            why += (
                " A step ends when an optimizer updates. In a loop without one, `memprof record --light` counts each "
                "call of the model as a step; `memprof report` shows what it holds at its peak, by line."
            )
        return LeakReport(Growth(None, why_unknown=why), ())
    sources, rise = find_sources(trace.table(Stacks)), steady_rise(ends.alive_bytes())
    if is_rising(ends):
        found = _from_storages(trace, ends, sources)
        grown = sum(leak.bytes_per_step for leak in found) or rise
    else:
        found = [*_replaced(trace, ends, sources), *_from_storages(trace, ends, sources, is_late=True)] if rise else []
        grown = rise
    return LeakReport(Growth(grown, int(ends.steps[0]), int(ends.steps[-1]), "storages"), _sorted(found))


def _sorted(leaks: list[Leak]) -> tuple[Leak, ...]:
    return tuple(sorted(leaks, key=lambda leak: -leak.bytes_per_step))


def _from_storages(trace: Trace, ends: StepEnds, sources: Sources, *, is_late: bool = False) -> list[Leak]:
    """Groups the storages kept from recorded steps by the line that made them; keeps the groups that always grow.

    Args:
        trace: The recording.
        ends: Its steps.
        sources: Its lines.
        is_late: Only what other threads made, which appears one step later if they made it at the end of a step.
    """
    ops, storages = trace.table(Ops), ends.storages
    kept = ends.is_kept(len(ends.steps) - 1) & (storages.created_op_id >= ends.first_op[0])
    if is_late:
        created, freed, last = storages.created_op_id, storages.freed_op_id, ends.last_op[-1]
        kept = (created >= ends.first_op[1]) & (created <= last) & ((freed == NONE) | (freed > last))
        kept &= storages.name == ELSEWHERE
    groups: dict[str, list[int]] = {}
    for row in np.flatnonzero(kept).tolist():
        if storages.name[row] == ELSEWHERE:  # the operator of then has not made it
            groups.setdefault(ELSEWHERE, []).append(row)
            continue
        op = int(storages.created_op_id[row])
        line = sources.of_stack(int(ops.stack_id[op]))
        place = line.place if line is not None else f"{ops.name[op]} {storages.module_id[row]}"
        groups.setdefault(place, []).append(row)
    steps_of = ops.step[storages.created_op_id] - int(is_late)
    held = _Held(trace, sources, steps_of)
    made_in = ends.steps[:-1].tolist()
    leaks = []
    for rows in groups.values():
        steps = steps_of[rows]
        # Made and kept in every step but the last, from the first of them on.
        if set(steps.tolist()) != set(range(int(steps.min()), made_in[-1] + 1)) or len(set(steps.tolist())) < 2:
            continue
        sizes = [int(storages.allocated_bytes[np.array(rows)[steps == step]].sum()) for step in sorted(set(steps))]
        leak = _leak(trace, storages, rows, int(np.median(sizes)), sum(sizes), int(steps.min()), sources)
        if leak.op:
            leaks.append(replace(leak, held_by=held.of(storages, rows, steps.tolist())))
        else:  # of another thread
            holder, shape, dtype = held.of_elsewhere(sizes)
            leaks.append(replace(leak, held_by=holder, shape=shape, dtype=dtype))
    return leaks


def _replaced(trace: Trace, ends: StepEnds, sources: Sources) -> list[Leak]:
    """Finds the lines whose tensor is replaced by a larger one in every step, such as a history that is joined anew."""
    ops, storages = trace.table(Ops), ends.storages
    groups: dict[str, list[int]] = {}
    for row in np.flatnonzero((storages.created_op_id >= ends.first_op[0]) & (storages.name != ELSEWHERE)).tolist():
        line = sources.of_stack(int(ops.stack_id[int(storages.created_op_id[row])]))
        if line is not None:
            groups.setdefault(line.place, []).append(row)
    held = _Held(trace, sources, ops.step[storages.created_op_id])
    leaks = []
    for rows in groups.values():
        sizes = ends.alive_bytes(np.array(rows))
        alive = [
            row for row in rows if storages.freed_op_id[row] == NONE or storages.freed_op_id[row] > ends.last_op[-1]
        ]
        if not alive or not (rise := steady_rise(sizes)):
            continue
        leak = _leak(trace, storages, alive, rise, int(sizes[-1]), None, sources)
        largest = _largest(storages, alive)
        step = int(ops.step[storages.created_op_id[largest]])
        leaks.append(replace(leak, held_by=held.of(storages, [largest], [step])))
    return leaks


def _variable(holders: Holders, row: int) -> str:
    """Returns the variable that a holder's chain begins with, up to its first index."""
    return str(holders.chain[row]).partition("[")[0]


def _leak(
    trace: Trace,
    storages: Storages,
    rows: list[int],
    bytes_per_step: int,
    kept_bytes: int,
    since_step: int | None,
    sources: Sources,
) -> Leak:
    """Returns the leak of some storages of one line, described by the largest, without its holder.

    Args:
        trace: The recording.
        storages: Its storages.
        rows: Those that stay.
        bytes_per_step: Growth per step.
        kept_bytes: Their bytes at the end of the observation.
        since_step: Step in which the oldest was made; None if unknown.
        sources: Lines of the recording.
    """
    ops, largest = trace.table(Ops), _largest(storages, rows)
    op = int(storages.created_op_id[largest])
    is_elsewhere = storages.name[largest] == ELSEWHERE  # the operator of then has not made it
    source = None if is_elsewhere else sources.of_stack(int(ops.stack_id[op]))
    return Leak(
        bytes_per_step=bytes_per_step,
        kept_bytes=kept_bytes,
        tensors=len(rows),
        since_step=since_step,
        category=str(storages.category[largest]),
        shape=str(storages.shape[largest]),
        dtype=str(storages.dtype[largest]),
        op="" if is_elsewhere else str(ops.name[op]),
        module=_title(trace.table(Modules), int(storages.module_id[largest])),
        line="" if source is None else source.place,
        held_by=None,
    )


def _largest(storages: Storages, rows: list[int]) -> int:
    return max(rows, key=lambda row: int(storages.allocated_bytes[row]))


def _title(modules: Modules, module: int) -> str:
    """Returns a module's name, or the type of the root; "" for none."""
    return "" if module == NONE else str(modules.name[module]) or str(modules.type[module])


class _Held:
    """Looks up what holds storages."""

    def __init__(self, trace: Trace, sources: Sources, steps_of: Ints) -> None:
        holders = trace.table(Holders)
        holders = holders.take((holders.tensors > 0) | holders.is_by_graph)  # others are not looked up for growth
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

    def of(self, storages: Storages, some: list[int], steps: list[int]) -> HeldBy | None:
        """Returns what holds some storages: a variable, else the graph of a tensor computed from them."""
        holders = self._holders
        is_known = holders.chain != ""
        rows = np.flatnonzero(np.isin(holders.storage_id, storages.storage_id[some]) & is_known)
        if len(rows):
            return held_by(holders, int(rows[0]), self._sources, is_by_graph=False)
        rows = np.flatnonzero(np.isin(self._by_graph.storage_id, storages.storage_id[some]))
        if len(rows):
            row = self._of_several_steps(self._by_graph, rows.tolist())
            return None if row == NONE else held_by(self._by_graph, row, self._sources, is_by_graph=True)
        alike = (holders.shape == storages.shape[some[0]]) & (holders.dtype == storages.dtype[some[0]])
        if int(holders.tensors[alike].max(initial=0)) > int(alike.sum()):
            return None  # it may be one of those that were not looked up
        has_graph: Bools = holders.has_graph & is_known & (holders.storage_id != NONE)
        kept = set(storages.storage_id[some].tolist())
        roots = []
        for row in np.flatnonzero(has_graph).tolist():
            storage = int(holders.storage_id[row])
            is_made_then = storage < len(self._steps_of) and int(self._steps_of[storage]) in steps
            if is_made_then and not kept.isdisjoint(self._computed_from(storage)):
                roots.append(row)
        # Of several graphs, any may hold it.
        is_one = len({_variable(holders, row) for row in roots}) == 1
        row = self._of_several_steps(holders, roots) if is_one else NONE
        return None if row == NONE else held_by(holders, row, self._sources, is_by_graph=True)

    def _of_several_steps(self, holders: Holders, rows: list[int]) -> int:
        """Returns the first row of a variable whose graphs are of several steps, NONE if there is none.

        The graph of the latest output is of one step, and keeps nothing of those before.
        """
        seen: dict[str, set[int]] = {}
        for row in rows:
            step = int(self._steps_of[int(holders.storage_id[row])])
            seen.setdefault(_variable(holders, row), set()).add(step)
        return next((row for row in rows if len(seen[_variable(holders, row)]) > 1), NONE)

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
        if len({str(holders.chain[row]).partition("[")[0] for row in rows}) != 1:
            return None, "", ""
        row = int(rows[0])
        held = held_by(holders, row, self._sources, is_by_graph=False)
        return held, str(holders.shape[row]), str(holders.dtype[row])

    def _computed_from(self, storage_id: int) -> set[int]:
        """Returns the storages that a storage was computed from in its own step: its graph keeps no others."""
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
                    if used not in found and used < len(self._steps_of) and self._steps_of[used] == step:
                        found.add(used)
                        waiting.append(used)
        self._origins[storage_id] = found
        return found
