"""Schedules the copies of idle values: out as early as possible, back as late as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.moves import Moves, Reads, Replay, lives_at, queue_end_us
from memprof.trace.schema import NONE, Bools, Floats, Ints


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
