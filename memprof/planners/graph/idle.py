"""When the copies of chosen idle values run: out as soon as they can, back as late as they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.moves import Moves, Reads, lives_at, queue_end_us
from memprof.planners.graph.replay import Replay
from memprof.trace.schema import NONE, Bools, Floats, Ints


@dataclass(frozen=True)
class Away:
    """A value that is to be away between two of the step's operators that use it.

    Attributes:
        value: The value.
        leave_op: The operator after which its copy out begins.
        gone_op: The operator by whose end its memory has to be free, whether the step waits for that or not; the
            number of operators where it leaves when its copy out is complete.
        back_op: The operator before which it may not take memory again; NONE where its copy back begins in time.
    """

    value: int
    leave_op: int
    gone_op: int
    back_op: int = NONE


@dataclass(frozen=True, eq=False)
class Placed:
    """Copies of values in the time of one schedule; columns of shape ``(aways,)``.

    Attributes:
        moves: Those that are away during a run at least.
        is_moved: Which those are.
        is_hidden: Whose copies are complete in time, so that nothing waits for them.
        gone_run: The last run while which each takes memory.
        back_run: The first while which it takes memory again.
    """

    moves: Moves
    is_moved: Bools
    is_hidden: Bools
    gone_run: Ints
    back_run: Ints


class Windows:
    """Places copies in the time of one schedule; what all placements share is looked up once."""

    def __init__(self, graph: Graph, done: Replay, link_bytes_per_us: float, waits_us: Floats | None = None) -> None:
        """Takes a schedule that was replayed without moves.

        Args:
            graph: The step.
            done: What its schedule comes to.
            link_bytes_per_us: Bandwidth to host memory.
            waits_us: How long it waits before each run anyway, shape ``(runs + 1,)``; not at all if left out.
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
        """Returns how long nobody uses each value after an operator, less its copies out and back.

        Source: Peng et al. 2020, Capuchin: the free time (FT) by which it orders what is swapped.
        """
        leave = self._first_run[leave_op]
        needed = self._needed(value, leave)
        copy_us = self._graph.value_bytes[value] / self._link
        idle: Floats = np.append(self._start_us, -np.inf)[needed] - self._end_us[leave] - 2 * copy_us
        return idle

    def place(self, aways: Sequence[Away]) -> Placed:
        """Places the copies: each queue does one after the other, in the order in which values leave or are needed."""
        value = np.array([away.value for away in aways], dtype=np.int64)
        leave = self._first_run[np.array([away.leave_op for away in aways], dtype=np.int64)]
        needed = self._needed(value, leave)
        # Where an operator that runs again makes a value anew, nobody reads the one that was there.
        is_wanted = needed < len(self._done.runs)
        needed = np.minimum(needed, len(self._done.runs) - 1)
        copy_us = np.where(is_wanted, self._graph.value_bytes[value] / self._link, 0.0)
        out_end = queue_end_us(self._end_us[leave], needed, copy_us)
        in_start = _as_late_as_possible(self._start_us[needed], copy_us)

        # What is complete during a run is free after it; what begins during a run takes memory with it.
        gone = np.maximum(np.searchsorted(self._start_us, out_end, side="left") - 1, leave)
        back = np.minimum(np.maximum(np.searchsorted(self._start_us, in_start, side="right") - 1, leave + 1), needed)
        gone_by = np.append(self._first_run, len(self._done.runs))[[away.gone_op for away in aways]]
        back_from = np.append(self._first_run, NONE)[[away.back_op for away in aways]]
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
    """Returns when each copy begins in a queue in which all are complete when due and none begins before it must."""
    order = np.argsort(-due_us, kind="stable")
    total = np.cumsum(copy_us[order])
    start = np.empty(len(order))
    start[order] = np.minimum.accumulate(due_us[order] + (total - copy_us[order])) - total if len(order) else total
    return start
