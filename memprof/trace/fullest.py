"""Chooses recorded steps: the one with the highest peak, and a representative (steady) one."""

from __future__ import annotations

from collections import Counter

import numpy as np

from memprof.phases import TRAINING
from memprof.trace.cut import cuttable_steps, rows_between
from memprof.trace.files.coded import coded_column
from memprof.trace.kept import kept
from memprof.trace.schema import NONE, NOT_RECORDED, Bools, Ints, Ops, Steps, Storages
from memprof.trace.step import sum_at


@kept
def peaks_by_step(steps: Steps, ops: Ops, storages: Storages) -> dict[int, tuple[int, int]]:
    """Returns the peak of each step that can be cut out, by step number, in step order: its bytes, and its operator.

    The values equal those of ``replay.live.live_bytes`` on each step, without cutting it out; operators are the first
    rows of ``ops`` with them.
    """
    during = live_during(ops, storages)
    during += ops.workspace_bytes
    peaks = {}
    for row in np.flatnonzero(cuttable_steps(steps))[np.argsort(steps.step[cuttable_steps(steps)], kind="stable")]:
        inside = rows_between(ops, steps.first_op_id[row], steps.last_op_id[row])
        highest = inside.start + int(np.argmax(during[inside])) if inside.start < inside.stop else NONE
        peaks[int(steps.step[row])] = max(int(during[highest]), 0) if highest != NONE else 0, highest
    return peaks


def live_during(ops: Ops, storages: Storages) -> Ints:
    """Returns the bytes of storages that are alive during each operator of a recording, without workspace.

    Returns:
        The bytes, shape ``(ops,)``.
    """
    born, sizes = rows_of_ops(ops, storages.created_op_id), storages.allocated_bytes
    changes = sum_at(born, sizes, len(ops))
    freed = sum_at(rows_of_ops(ops, storages.freed_op_id), sizes, len(ops))
    changes[1:] -= freed[:-1]
    during: Ints = np.cumsum(changes, out=changes)
    during += sizes[born == NONE].sum()
    return during


def find_fullest_step(steps: Steps, ops: Ops, storages: Storages, *, is_whole: bool = False) -> int | None:
    """Finds the step with the highest peak; on a tie the steady step if it is among them, else the last.

    Recorded steps take precedence over the warm-up, and complete steps over those in which the recording ends; of the
    latter, only those without backward or update count, such as an evaluation after the last step.

    Args:
        steps: Every step seen.
        ops: The operators recorded.
        storages: The storages recorded.
        is_whole: Only complete steps, if there are any.

    Returns:
        The step's number in the job; None where no step has operators.
    """
    steady = find_steady_step(steps, ops)
    if steady is None:
        return None
    peaks = {number: size for number, (size, _) in peaks_by_step(steps, ops, storages).items()}
    numbers = comparable_steps(steps, ops, steady)
    if is_whole:
        whole = set(steps.step[steps.is_complete].tolist())
        numbers = [number for number in numbers if number in whole] or numbers
    highest = max(peaks[number] for number in numbers)
    fullest = [number for number in numbers if peaks[number] == highest]
    return steady if steady in fullest else fullest[-1]


def comparable_steps(steps: Steps, ops: Ops, steady: int) -> list[int]:
    """Returns the numbers of the steps whose peaks are comparable with the steady step's, in order.

    If the job evaluated before a step was completely recorded and then ended, they include its warm-up steps.
    """
    kept = np.flatnonzero(steps.step == steady)[0]
    is_cuttable = cuttable_steps(steps)
    counts = is_cuttable & (steps.kind == steps.kind[kept])
    if steps.is_complete[kept]:
        counts &= steps.is_complete | ~_runs(steps, ops, ("backward", "optimizer"))
    elif not _runs(steps, ops, TRAINING)[kept]:
        counts |= is_cuttable & steps.is_complete
    return sorted(int(steps.step[row]) for row in np.flatnonzero(counts))


def _runs(steps: Steps, ops: Ops, phases: tuple[str, ...]) -> Bools:
    """Returns which steps run operators of any of some phases, shape ``(steps,)``."""
    training = ops.op_id[coded_column(ops, "phase").is_any(*phases)]
    found: Bools = np.searchsorted(training, steps.first_op_id) < np.searchsorted(
        training, steps.last_op_id, side="right"
    )
    return found


def rows_of_ops(ops: Ops, ids: Ints) -> Ints:
    """Returns the row of each operator; NONE where there is none."""
    if len(ops) and ops.op_id[0] == 0 and ops.op_id[-1] == len(ops) - 1:
        return ids  # ids are distinct and in order: those of a file, which are its rows
    return np.where(ids == NONE, NONE, np.searchsorted(ops.op_id, ids))


@kept
def find_steady_step(steps: Steps, ops: Ops) -> int | None:
    """Finds the last of the steps with the most common operator sequence.

    Complete steps take precedence over those in which the recording ends, recorded steps over the warm-up, and steps of
    the window over later ones, whose inputs are larger.

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
    gaps = ops.op_id[coded_column(ops, "name").is_any(NOT_RECORDED)]
    before = rows[steps.first_op_id[rows] < gaps.min(initial=np.iinfo(np.int64).max)]
    return before if len(before) else rows


def _last_of_most(steps: Steps, rows: Ints, ops: Ops) -> int:
    """Returns the last of the rows with the most frequent sequence of operator names; the later on a tie."""
    names = coded_column(ops, "name").codes
    sequences = {
        int(row): names[rows_between(ops, steps.first_op_id[row], steps.last_op_id[row])].tobytes()
        for row in rows[np.argsort(steps.step[rows])]
    }
    counts = Counter(sequences.values())
    return max(enumerate(sequences), key=lambda place: (counts[sequences[place[1]]], place[0]))[1]
