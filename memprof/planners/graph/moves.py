"""What replaying a schedule comes to, and values offloaded to host memory for a while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import InvariantError
from memprof.trace.schema import NONE, Bools, Floats, Ints

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, eq=False)
class Moves:
    """Values offloaded to host memory in one schedule. Columns have shape ``(moves,)``.

    Attributes:
        value: The value.
        leave_run: The run after which its copy out begins; it makes or reads the value.
        gone_run: The last run during which it is still allocated; at least ``leave_run``.
        back_run: The first run during which it is allocated again, at whose start its copy back begins. After
            ``gone_run``, and no later than the first run after ``leave_run`` that reads the value.
        link_bytes_per_us: Bandwidth to host memory, in each direction.
    """

    value: Ints
    leave_run: Ints
    gone_run: Ints
    back_run: Ints
    link_bytes_per_us: float

    def __len__(self) -> int:
        """Returns the number of moves."""
        return len(self.value)


def lives_at(done: Replay, value: Ints, run: Ints) -> Ints:
    """Returns the latest life of each value that began by a run; NONE where it has not been made."""
    step = len(done.runs) + 1
    life = np.searchsorted(done.life_value * step + done.life_born, value * step + run, side="right") - 1
    found: Ints = np.where((life >= 0) & (np.append(done.life_value, NONE)[life] == value), life, NONE)
    return found


class Reads:
    """The reads of a schedule by life."""

    def __init__(self, done: Replay) -> None:
        """Sorts them."""
        self._step = len(done.runs) + 1
        self._key = np.append(np.sort(done.read_life * self._step + done.read_run), np.iinfo(np.int64).max)

    def next_after(self, life: Ints, run: Ints) -> Ints:
        """Returns the first run after a given one that reads each life; the number of runs for none."""
        found = self._key[np.searchsorted(self._key, life * self._step + run, side="right")]
        read: Ints = np.where(found // self._step == life, found % self._step, self._step - 1)
        return read


def needed_runs(done: Replay, moves: Moves) -> Ints:
    """Returns the first run that reads each value after it left, shape ``(moves,)``.

    Raises:
        InvariantError: A value leaves while it is not live, is never read again, or is read while it is away.
    """
    life = lives_at(done, moves.value, moves.leave_run)
    if np.any(life == NONE):
        raise InvariantError("The schedule offloads a value before it is made.")
    needed = Reads(done).next_after(life, moves.leave_run)
    if np.any(needed >= len(done.runs)):
        raise InvariantError("The schedule offloads a value that is not read again; drop it instead.")
    in_order = (moves.leave_run <= moves.gone_run) & (moves.gone_run < moves.back_run) & (moves.back_run <= needed)
    if not in_order.all():
        raise InvariantError("The schedule loads a value back after it is read, or before it is offloaded.")
    if len(np.unique(life * (len(done.runs) + 1) + needed)) < len(life):
        raise InvariantError("The schedule offloads a value that is already offloaded.")
    return needed


def away_bytes(moves: Moves, value_bytes: Ints, runs: int) -> Ints:
    """Returns the bytes offloaded during each run, shape ``(runs,)``."""
    change = np.zeros(runs + 1, dtype=np.int64)
    size = value_bytes[moves.value]
    np.add.at(change, moves.gone_run + 1, size)
    np.subtract.at(change, moves.back_run, size)
    away: Ints = np.cumsum(change)[:runs]
    return away


def waits_us(moves: Moves, needed: Ints, value_bytes: Ints, run_us: Floats) -> Floats:
    """Returns how long the step waits for copies before each run and after the last, shape ``(runs + 1,)``.

    Source: Peng et al. 2020, Capuchin: Tensor-based GPU Memory Management for Deep Learning: copies that overlap with
    computation cost nothing; the step waits for the exposed rest.

    Args:
        moves: The offloaded values.
        needed: The first run that reads each after it left.
        value_bytes: Size of each value of the graph.
        run_us: Duration of each run.
    """
    starts = np.concatenate([[0.0], np.cumsum(run_us)])
    sizes_us = value_bytes[moves.value] / moves.link_bytes_per_us
    out_end = queue_end_us(starts[moves.leave_run + 1], needed, sizes_us)
    in_end = queue_end_us(starts[moves.back_run], needed, sizes_us)
    if np.all(out_end <= starts[moves.gone_run + 1]) and np.all(in_end <= starts[needed]):
        return np.zeros(len(starts))  # nothing is late, so nothing delays anything else
    clock, copy_us, count = starts.tolist(), sizes_us.tolist(), len(moves)
    number = np.arange(count)
    # Order between two runs: start copies out, wait for memory that must be free, start copies back, wait for values
    # that are read.
    boundary = np.concatenate([moves.leave_run + 1, moves.gone_run + 1, moves.back_run, needed])
    kind = np.repeat([0, 1, 2, 3], count)
    events = np.lexsort((np.tile(needed, 4), kind, boundary))
    out_free = in_free = late = 0.0
    done = [0.0] * count
    waits = [0.0] * len(clock)
    move_of, kind_of, boundary_of = np.tile(number, 4).tolist(), kind.tolist(), boundary.tolist()
    for event in events.tolist():
        move = move_of[event]
        now = clock[boundary_of[event]] + late
        if kind_of[event] == 0:
            out_free = done[move] = max(out_free, now) + copy_us[move]
        elif kind_of[event] == 2:
            in_free = done[move] = max(in_free, now) + copy_us[move]
        else:
            wait = max(0.0, done[move] - now)
            waits[boundary_of[event]] += wait
            late += wait
    return np.array(waits)


def queue_end_us(ready_us: Floats, needed: Ints, copy_us: Floats) -> Floats:
    """Returns when each copy completes in a queue ordered by readiness, ties by need."""
    order = np.lexsort((needed, ready_us))
    total = np.cumsum(copy_us[order])
    end = np.empty(len(order))
    end[order] = np.maximum.accumulate(ready_us[order] - (total - copy_us[order])) + total if len(order) else total
    return end


@dataclass(frozen=True, eq=False)
class Replay:
    """The result of replaying a schedule.

    A *life* is the lifetime of a value between one run of its operator and the last read of that run's output.

    Attributes:
        runs: The operators in order, shape ``(runs,)``.
        is_again: Which runs repeat an operator, shape ``(runs,)``.
        during_bytes: Allocated bytes during each run, workspace included, shape ``(runs,)``.
        life_value: The value of each life, ordered by value and birth, shape ``(lives,)``.
        life_born: The run that makes it.
        life_freed: The last run before it is freed; the number of runs where it outlives the step.
        read_run: Runs that read values, shape ``(reads,)``.
        read_life: The life each reads.
        extra_us: Time of the runs that repeat, in microseconds.
        stall_us: Time the step waits for copies of values offloaded to host memory.
    """

    runs: Ints
    is_again: Bools
    during_bytes: Ints
    life_value: Ints
    life_born: Ints
    life_freed: Ints
    read_run: Ints
    read_life: Ints
    extra_us: float
    stall_us: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Peak allocated bytes."""
        return int(self.during_bytes.max(initial=0))
