"""What replaying a schedule comes to, values offloaded to host memory, and when idle ones are copied.

Leave and return are given in runs of a schedule, not in time, so live bytes never depend on copy speed. Only time does:
the step waits for a copy out at the last run that may still hold the value's memory, and for a copy back at the run
that reads it. Copies run concurrently with the computation, one at a time in one queue per direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.errors import InvariantError
from memprof.planners.graph.graph import Graph
from memprof.trace.schema import NONE, Bools, Floats, Ints


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
        raise InvariantError("the schedule offloads a value before it is made.")
    needed = Reads(done).next_after(life, moves.leave_run)
    if np.any(needed >= len(done.runs)):
        raise InvariantError("the schedule offloads a value that is not read again; drop it instead.")
    in_order = (moves.leave_run <= moves.gone_run) & (moves.gone_run < moves.back_run) & (moves.back_run <= needed)
    if not in_order.all():
        raise InvariantError("the schedule loads a value back after it is read, or before it is offloaded.")
    if len(np.unique(life * (len(done.runs) + 1) + needed)) < len(life):
        raise InvariantError("the schedule offloads a value that is already offloaded.")
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


@dataclass(frozen=True)
class Absence:
    """A value to be offloaded between two operators that use it.

    Attributes:
        value: The value.
        leave_op: The operator after which its copy out begins.
        gone_op: The operator by whose end its memory must be free, even if the step has to wait; the number of
            operators if it is freed whenever its copy out completes.
        back_op: The operator before which it may not be allocated again; NONE where its copy back begins just in time.
    """

    value: int
    leave_op: int
    gone_op: int
    back_op: int = NONE


@dataclass(frozen=True, eq=False)
class Placed:
    """Copies of values placed in one schedule; columns of shape ``(aways,)``.

    Attributes:
        moves: Those that are away during at least one run.
        is_moved: Which aways those are.
        is_hidden: Whether its copies complete in time, so that nothing waits for them.
        gone_run: The last run during which each is still allocated.
        back_run: The first run during which it is allocated again.
    """

    moves: Moves
    is_moved: Bools
    is_hidden: Bools
    gone_run: Ints
    back_run: Ints


class Windows:
    """Places copies in one schedule, sharing lookups between placements."""

    def __init__(self, graph: Graph, done: Replay, link_bytes_per_us: float, waits_us: Floats | None = None) -> None:
        """Reads a schedule that was replayed without moves.

        Args:
            graph: The step.
            done: The replayed schedule.
            link_bytes_per_us: Bandwidth to host memory.
            waits_us: How long it already waits before each run, shape ``(runs + 1,)``; zero if omitted.
        """
        self._graph = graph
        self._done = done
        self._reads = Reads(done)
        self._link = link_bytes_per_us
        run_us = graph.cost_us[done.runs]
        self._end_us = np.cumsum(run_us if waits_us is None else run_us + waits_us[:-1])
        self._start_us = self._end_us - run_us
        self._first_run = np.flatnonzero(~done.is_again)

    def idle_us(self, value: Ints, leave_op: Ints) -> Floats:
        """Returns how long each value is unused after an operator, less its copies out and back.

        Source: Peng et al. 2020, Capuchin: the free time (FT), its order of swap candidates.
        """
        leave = self._first_run[leave_op]
        needed = self._needed(value, leave)
        copy_us = self._graph.value_bytes[value] / self._link
        idle: Floats = np.append(self._start_us, -np.inf)[needed] - self._end_us[leave] - 2 * copy_us
        return idle

    def place(self, absences: Sequence[Absence]) -> Placed:
        """Places the copies: each queue runs one at a time, in the order in which values leave or are needed."""
        value = np.array([away.value for away in absences], dtype=np.int64)
        leave = self._first_run[np.array([away.leave_op for away in absences], dtype=np.int64)]
        needed = self._needed(value, leave)
        # Where a repeated operator makes a value anew, the old copy is not read again.
        is_wanted = needed < len(self._done.runs)
        needed = np.minimum(needed, len(self._done.runs) - 1)
        copy_us = np.where(is_wanted, self._graph.value_bytes[value] / self._link, 0.0)
        out_end = queue_end_us(self._end_us[leave], needed, copy_us)
        in_start = _as_late_as_possible(self._start_us[needed], copy_us)

        # A copy complete during a run frees memory after it; one that begins during a run allocates with it.
        gone = np.maximum(np.searchsorted(self._start_us, out_end, side="left") - 1, leave)
        back = np.minimum(np.maximum(np.searchsorted(self._start_us, in_start, side="right") - 1, leave + 1), needed)
        gone_by = np.append(self._first_run, len(self._done.runs))[[away.gone_op for away in absences]]
        back_from = np.append(self._first_run, NONE)[[away.back_op for away in absences]]
        is_forced = (gone_by < gone) | (back_from > back)
        gone = np.maximum(np.minimum(gone, gone_by), leave)
        back = np.minimum(np.maximum(back, back_from), needed)
        is_moved = (gone + 1 < back) & is_wanted
        return Placed(
            moves=Moves(value[is_moved], leave[is_moved], gone[is_moved], back[is_moved], self._link),
            is_moved=is_moved,
            is_hidden=((in_start >= out_end) & ~is_forced) | ~is_wanted,
            gone_run=gone,
            back_run=back,
        )

    def _needed(self, value: Ints, leave: Ints) -> Ints:
        return self._reads.next_after(lives_at(self._done, value, leave), leave)


def _as_late_as_possible(due_us: Floats, copy_us: Floats) -> Floats:
    """Returns when each copy of a queue begins, as late as possible with all complete when due."""
    order = np.argsort(-due_us, kind="stable")
    total = np.cumsum(copy_us[order])
    start = np.empty(len(order))
    start[order] = np.minimum.accumulate(due_us[order] + (total - copy_us[order])) - total if len(order) else total
    return start
