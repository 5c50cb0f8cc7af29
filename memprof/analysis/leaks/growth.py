"""Whether live memory grows from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.cut import cuttable_steps
from memprof.trace.schema import NONE, NOT_RECORDED, Bools, Ints, Ops, StepPeaks, Steps, Storages
from memprof.trace.store import Trace

#: Growth is a rise in each of this many steps in a row; with fewer recorded, it is unknown.
LEAST_STEPS = 3
#: A rise is steady if the largest is at most this multiple of the smallest.
_STEADY = 1.25
#: A run is divided into this many parts, of which each must reach a higher floor than the one before.
_PARTS = 6
#: Growth that has slowed down to this share of what it was is that of a cache that fills up.
_LEAST_SHARE = 0.25


@dataclass(frozen=True)
class Growth:
    """How live memory changes over steps.

    Attributes:
        bytes_per_step: Growth per step; 0 where memory does not grow, None where unknown.
        first_step: First step of the observation.
        last_step: Last one.
        how: ``storages``: from every allocation of consecutive steps; ``counts``: from the peaks of a whole run;
            ``""`` where unknown.
        why_unknown: A sentence; "" where known.
    """

    bytes_per_step: int | None
    first_step: int = 0
    last_step: int = 0
    how: str = ""
    why_unknown: str = ""


@dataclass(frozen=True, eq=False)
class StepEnds:
    """Storages that are older than a step at its end, in consecutive steps.

    Attributes:
        steps: Their numbers, shape ``(steps,)``.
        first_op: First operator of each.
        last_op: Last operator of each.
        storages: All storages of the recording.
    """

    steps: Ints
    first_op: Ints
    last_op: Ints
    storages: Storages

    def is_kept(self, place: int) -> Bools:
        """Returns which storages were made before a step and are alive at its end, shape ``(storages,)``."""
        created, freed = self.storages.created_op_id, self.storages.freed_op_id
        kept: Bools = (created < self.first_op[place]) & ((freed == NONE) | (freed > self.last_op[place]))
        return kept

    def alive_bytes(self, rows: Ints | slice = slice(None)) -> Ints:
        """Returns the bytes alive at the end of each step, of all storages or of some rows, shape ``(steps,)``."""
        some = self.storages.take(rows)
        freed = np.where(some.freed_op_id == NONE, self.last_op[-1] + 1, some.freed_op_id)
        born, died = (_sums_until(ops, some.allocated_bytes, self.last_op) for ops in (some.created_op_id, freed))
        return born - died

    def kept_bytes(self) -> Ints:
        """Returns the bytes of those storages at the end of each step, shape ``(steps,)``."""
        sizes = self.storages.allocated_bytes
        return np.array([int(sizes[self.is_kept(place)].sum()) for place in range(len(self.steps))], dtype=np.int64)


def _sums_until(ops: Ints, sizes: Ints, last: Ints) -> Ints:
    """Returns the sum of the sizes whose operator is at most each of ``last``."""
    order = np.argsort(ops, kind="stable")
    sums = np.concatenate(([0], np.cumsum(sizes[order])))
    found: Ints = sums[np.searchsorted(ops[order], last, side="right")]
    return found


def find_step_ends(trace: Trace) -> StepEnds | None:
    """Returns the last run of consecutive complete recorded steps; None if there is none."""
    steps, ops, storages = trace.table(Steps), trace.table(Ops), trace.table(Storages)
    rows = np.flatnonzero(cuttable_steps(steps) & steps.is_complete)
    if not len(rows):
        return None
    numbers = steps.step[rows]
    gaps = ops.op_id[ops.name == NOT_RECORDED]
    if len(gaps):  # storages that span a gap are two: only what was recorded before it counts
        rows = rows[steps.last_op_id[rows] < gaps[0]]
        storages = storages.replace(freed_op_id=np.where(storages.freed_op_id >= gaps[0], NONE, storages.freed_op_id))
        storages = storages.take(storages.created_op_id < gaps[0])
        numbers = steps.step[rows]
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    rows = rows[breaks[-1] + 1 :] if len(breaks) else rows
    return StepEnds(steps.step[rows], steps.first_op_id[rows], steps.last_op_id[rows], storages) if len(rows) else None


def is_rising(ends: StepEnds) -> bool:
    """Whether more memory is older than a step at the end of each step than at that of the step before."""
    rises = np.diff(ends.kept_bytes())
    # With the first step, what was set up before it may go.
    return bool((rises[1:] if len(rises) >= LEAST_STEPS else rises).min(initial=1) > 0)


def steady_rise(sizes: Ints) -> int:
    """Returns by how much sizes rise each time if that is always nearly the same, else 0.

    A tensor that is replaced by a larger one in every step is never older than a step; batches of different sizes do
    not rise steadily.
    """
    rises = np.diff(sizes)
    is_steady = bool((rises > 0).all()) and int(rises.max()) <= int(rises.min()) * _STEADY
    return int(np.median(rises)) if is_steady else 0


def growth_of_run(peaks: StepPeaks) -> Growth | None:
    """Returns the growth of the peaks of a whole run: of their floor, since batches differ; None with too few."""
    if not len(peaks):
        return None
    names, counts = np.unique(peaks.how.astype(str), return_counts=True)
    alike = np.flatnonzero(peaks.how == names[np.argmax(counts)])  # sampled peaks are lower than complete ones
    alike = alike[len(alike) // 4 :]  # optimizer state and caches are set up in the first steps
    if len(alike) < _PARTS:
        return Growth(None, why_unknown=f"the run has {len(peaks)} steps; growth shows from {_PARTS * 4 // 3} on.")
    steps, sizes = peaks.step[alike], peaks.allocated_bytes[alike]
    parts = np.array_split(np.arange(len(alike)), _PARTS)
    floors = np.array([part[np.argmin(sizes[part])] for part in parts])
    rises, spans = np.diff(sizes[floors]), np.maximum(np.diff(steps[floors]), 1)
    rates = rises / spans
    is_rising = bool((rises > 0).all()) and rates[-1] >= _LEAST_SHARE * rates.max()
    whole = (sizes[floors[-1]] - sizes[floors[0]]) / max(int(steps[floors[-1]] - steps[floors[0]]), 1)
    return Growth(round(whole) if is_rising else 0, int(steps[0]), int(steps[-1]), "counts")
