"""Cuts one step out of a trace."""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np

from memprof.errors import UsageError
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


def cut_step(trace: TableSource, number: int) -> Step:
    """Cuts one step out of a trace.

    Args:
        trace: Where the tables come from.
        number: The step's number in the job; it must have recorded operators.

    Returns:
        The step, with ids as ``Step`` describes.

    Raises:
        UsageError: The trace has no operators of that step; the message lists the steps it has.
    """
    steps = trace.table(Steps)
    row = _find_step(steps, number)
    first, last = int(steps.first_op_id[row]), int(steps.last_op_id[row])

    ops = trace.table(Ops)
    ops = ops.take(_within(ops.op_id, first, last))
    ops = ops.replace(op_id=ops.op_id - first, forward_op_id=_rebase(ops.forward_op_id, first, last))

    storages = trace.table(Storages)
    trained = storages.module_id[(storages.module_id != NONE) & (storages.category == "gradient")]
    is_born = (storages.created_op_id == NONE) | (storages.created_op_id <= last)
    is_left = (storages.freed_op_id == NONE) | (storages.freed_op_id >= first)
    storages = storages.take(is_born & is_left)
    storages = storages.take(np.lexsort((storages.storage_id, storages.created_op_id)))
    storage_ids = storages.storage_id
    storages = storages.replace(
        storage_id=np.arange(len(storages)),
        created_op_id=_rebase(storages.created_op_id, first, last),
        freed_op_id=_rebase(storages.freed_op_id, first, last),
        held_op_id=_rebase(storages.held_op_id, first, last),
    )

    uses = trace.table(Uses)
    uses = uses.take(_within(uses.op_id, first, last))
    saved = trace.table(Saved)
    saved = saved.take(_within(saved.forward_op_id, first, last))
    memory = trace.table(Memory)
    memory = memory.take(_within(memory.op_id, first, last))
    calls = trace.table(ModuleCalls)
    calls = calls.take(calls.step == number)

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
        trained_modules=tuple(np.unique(trained).tolist()),
    )


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
        raise UsageError(f"The trace has no operators of step {number}; {known}.")
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
    order = np.argsort(kept_ids, kind="stable")
    places = np.minimum(np.searchsorted(kept_ids[order], ids), len(kept_ids) - 1)
    rows: Ints = order[places]
    return np.where((ids != NONE) & (kept_ids[rows] == ids), rows, NONE)
