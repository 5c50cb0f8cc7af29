"""Cuts steps out of a trace."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np

from memprof.errors import UsageError
from memprof.trace.files.coded import coded_column
from memprof.trace.schema import (
    NONE,
    Bools,
    Ints,
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

T = TypeVar("T", bound=Table)


class TableSource(Protocol):
    """A source of a trace's tables."""

    def table(self, kind: type[T], /) -> T:
        """Returns the table of the given kind."""
        ...


class StepCuts:
    """Cuts steps out of a trace, after looking once at which rows belong to which: a trace may hold hundreds."""

    def __init__(self, trace: TableSource) -> None:
        """Reads nothing yet."""
        self._trace = trace
        self._is_sorted: dict[type[Table], bool] = {}

    def cut(self, number: int) -> Step:
        """Cuts out one step.

        Args:
            number: The step's number in the job; it must have recorded operators.

        Returns:
            The step, with ids as ``Step`` describes.

        Raises:
            UsageError: The trace has no operators of that step; the message lists the steps it has.
        """
        trace = self._trace
        steps = trace.table(Steps)
        row = _find_step(steps, number)
        first, last = int(steps.first_op_id[row]), int(steps.last_op_id[row])

        ops = self._part(Ops, trace.table(Ops).op_id, first, last)
        ops = ops.replace(op_id=ops.op_id - first, forward_op_id=_rebase(ops.forward_op_id, first, last))

        storages = trace.table(Storages).take(self._alive(first, last))
        storage_ids = storages.storage_id
        storages = storages.replace(
            storage_id=np.arange(len(storages)),
            created_op_id=_rebase(storages.created_op_id, first, last),
            freed_op_id=_rebase(storages.freed_op_id, first, last),
            held_op_id=_rebase(storages.held_op_id, first, last),
        )

        uses = self._part(Uses, trace.table(Uses).op_id, first, last)
        saved = self._part(Saved, trace.table(Saved).forward_op_id, first, last)
        memory = self._part(Memory, trace.table(Memory).op_id, first, last)
        calls = self._part(ModuleCalls, trace.table(ModuleCalls).step, number, number)

        return Step(
            number=number,
            duration_us=_duration_us(steps, row),
            modules=trace.table(Modules),
            module_calls=calls.replace(
                module_call_id=np.arange(len(calls)),
                parent_call_id=_rows_of(calls.parent_call_id, calls.module_call_id),
                first_op_id=_rebase(calls.first_op_id, first, last),
                last_op_id=_rebase(calls.last_op_id, first, last),
            ),
            stacks=trace.table(Stacks),
            ops=ops,
            storages=storages,
            uses=uses.replace(op_id=uses.op_id - first, storage_id=_rows_of(uses.storage_id, storage_ids)),
            saved=saved.replace(
                storage_id=_rows_of(saved.storage_id, storage_ids),
                forward_op_id=saved.forward_op_id - first,
                released_op_id=_rebase(saved.released_op_id, first, last),
            ),
            memory=memory.replace(op_id=memory.op_id - first),
            first_op_id=first,
            storage_ids=storage_ids,
            trained_modules=self._trained,
        )

    def doubtful(self) -> list[int]:
        """Returns the steps in which storages seem to be used while not alive, from whole tables; cuts out none.

        They include each step whose lives ``Step.check_lives`` rejects for what it uses, saves or releases.
        """
        steps, uses, saved = self._trace.table(Steps), self._trace.table(Uses), self._trace.table(Saved)
        storages = self._trace.table(Storages)
        used, kept = _rows_of(uses.storage_id, storages.storage_id), _rows_of(saved.storage_id, storages.storage_id)
        released = np.where(saved.released_op_id == NONE, saved.forward_op_id, saved.released_op_id)
        found = []
        for rows, op_ids, by in (
            (used, uses.op_id, uses.op_id),
            (kept, saved.forward_op_id, saved.forward_op_id),
            (kept, released, saved.forward_op_id),
        ):
            created, freed = storages.created_op_id[rows], storages.freed_op_id[rows]
            found.append(by[(rows == NONE) | (created > op_ids) | ((freed != NONE) & (freed < op_ids))])
        wrong, is_cuttable = np.sort(np.concatenate(found)), cuttable_steps(steps)
        low = np.searchsorted(wrong, steps.first_op_id)
        high = np.searchsorted(wrong, steps.last_op_id, side="right")
        return sorted(steps.step[is_cuttable & (low < high)].tolist())

    def _part(self, kind: type[T], ids: Ints, first: int, last: int) -> T:
        """Returns a copy of the rows of a table whose ids are from one to another, both included."""
        if kind not in self._is_sorted:
            self._is_sorted[kind] = bool((ids[1:] >= ids[:-1]).all())
        if not self._is_sorted[kind]:
            return self._trace.table(kind).take(np.flatnonzero(_within(ids, first, last)))
        low, high = np.searchsorted(ids, [first, last + 1])
        return self._trace.table(kind).take(np.arange(low, high))

    def _alive(self, first: int, last: int) -> Ints:
        """Returns the rows of the storages that are alive during a step, in the order of their creation."""
        order, created, outliving = self._lives
        freed = self._trace.table(Storages).freed_op_id
        low, high = np.searchsorted(created, [first, last + 1])
        before, made = outliving[: int(np.searchsorted(created[outliving], first))], np.arange(low, high)
        if order is not None:
            before, made = order[before], order[made]
        return np.concatenate([before[(freed[before] == NONE) | (freed[before] >= first)], made])

    @cached_property
    def _lives(self) -> tuple[Ints | None, Ints, Ints]:
        """Rows of the storages in the order of their creation, when each is created, and which outlive their step.

        Rows are None where that is the order of the table, as in most recordings.
        """
        storages, steps = self._trace.table(Storages), self._trace.table(Steps)
        order, created, freed = None, storages.created_op_id, storages.freed_op_id
        if (created[1:] < created[:-1]).any() or (storages.storage_id[1:] < storages.storage_id[:-1]).any():
            order = np.lexsort((storages.storage_id, created))
            created, freed = created[order], freed[order]
        starts = np.append(np.sort(steps.first_op_id[steps.first_op_id != NONE]), np.iinfo(np.int64).max)
        next_start = starts[np.searchsorted(starts[:-1], created, side="right")]
        return order, created, np.flatnonzero((freed == NONE) | (freed >= next_start))

    @cached_property
    def _trained(self) -> tuple[int, ...]:
        """Modules whose parameters had gradients."""
        storages = self._trace.table(Storages)
        trained = storages.module_id[
            coded_column(storages, "category").is_any("gradient") & (storages.module_id != NONE)
        ]
        return tuple(np.unique(trained).tolist())


def cuttable_steps(steps: Steps) -> Bools:
    """Returns which rows of ``steps`` have recorded operators and can be cut out, shape ``(steps,)``."""
    is_recorded: Bools = (steps.kind == "recorded") | (steps.kind == "warm_up")
    has_ops: Bools = (steps.first_op_id != NONE) & (steps.last_op_id != NONE)
    return is_recorded & has_ops


def rows_between(ops: Ops, first_op_id: int, last_op_id: int) -> slice:
    """Returns the rows of the operators from one to another, both included; operators are in the order of their ids."""
    low, high = np.searchsorted(ops.op_id, [first_op_id, last_op_id + 1])
    return slice(int(low), int(high))


def _find_step(steps: Steps, number: int) -> int:
    is_cuttable = cuttable_steps(steps)
    rows = np.flatnonzero(is_cuttable & (steps.step == number))
    if not len(rows):
        numbers = [str(step) for step in np.sort(steps.step[is_cuttable])]
        known = f"recorded steps: {', '.join(numbers)}" if numbers else "no step of it was recorded"
        raise UsageError(f"the trace has no operators of step {number}; {known}.")
    return int(rows[0])


def _duration_us(steps: Steps, row: int) -> float:
    """Returns the median duration of the uninstrumented steps, or that of the recorded step where there are none."""
    plain = steps.duration_us[(steps.kind == "plain") & steps.is_complete & ~np.isnan(steps.duration_us)]
    if not len(plain):
        return float(steps.duration_us[row])
    middle = np.sort(plain)[[(len(plain) - 1) // 2, len(plain) // 2]]
    return float(middle.mean())  # not np.median, which imports masked arrays


def _within(ids: Ints, first: int, last: int) -> Bools:
    return (ids >= first) & (ids <= last)


def _rebase(ids: Ints, first: int, last: int) -> Ints:
    """Renumbers ids from ``first`` on; those outside the range become NONE."""
    return np.where(_within(ids, first, last), ids - first, NONE)


def _rows_of(ids: Ints, kept_ids: Ints) -> Ints:
    """Returns the row of each id in ``kept_ids`` (unique, any order), or NONE where it is missing."""
    if not len(kept_ids):
        return np.full(len(ids), NONE, dtype=np.int64)
    if np.array_equal(kept_ids, np.arange(len(kept_ids))):
        return np.where((ids >= 0) & (ids < len(kept_ids)), ids, NONE)
    order = np.argsort(kept_ids, kind="stable")
    places = np.minimum(np.searchsorted(kept_ids[order], ids), len(kept_ids) - 1)
    rows: Ints = order[places]
    return np.where((ids != NONE) & (kept_ids[rows] == ids), rows, NONE)
