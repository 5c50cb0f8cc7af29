"""Chooses the representative (steady) step of a recording."""

from __future__ import annotations

from collections import Counter

import numpy as np

from memprof.trace.cut import cuttable_steps, rows_between
from memprof.trace.schema import NOT_RECORDED, Ints, Ops, Steps


def find_steady_step(steps: Steps, ops: Ops) -> int | None:
    """Finds the last of the steps with the most common operator sequence.

    Complete steps take precedence over those in which the recording ends, recorded steps over the warm-up, and steps of
    the window over later ones, whose inputs are larger.

    Args:
        steps: Every step seen.
        ops: The operators recorded.

    Returns:
        The step's number in the job; None where no step has operators.
    """
    for kind in ("recorded", "warm_up"):
        for is_complete in (True, False):
            rows = np.flatnonzero(cuttable_steps(steps) & (steps.kind == kind) & (steps.is_complete == is_complete))
            rows = _of_window(steps, rows, ops)
            if len(rows):
                return int(steps.step[_last_of_most(steps, rows, ops)])
    return None


def _of_window(steps: Steps, rows: Ints, ops: Ops) -> Ints:
    """Returns the rows before the first gap, or all of them if there are none."""
    gaps = ops.op_id[ops.name == NOT_RECORDED]
    before = rows[steps.first_op_id[rows] < gaps.min(initial=np.iinfo(np.int64).max)]
    return before if len(before) else rows


def _last_of_most(steps: Steps, rows: Ints, ops: Ops) -> int:
    """Returns the last of the rows with the most frequent sequence of operator names; the later on a tie."""
    codes: dict[str, int] = {}
    names = np.array([codes.setdefault(name, len(codes)) for name in ops.name.tolist()], dtype=np.int64)
    sequences = {
        int(row): names[rows_between(ops, steps.first_op_id[row], steps.last_op_id[row])].tobytes()
        for row in rows[np.argsort(steps.step[rows])]
    }
    counts = Counter(sequences.values())
    return max(enumerate(sequences), key=lambda place: (counts[sequences[place[1]]], place[0]))[1]
