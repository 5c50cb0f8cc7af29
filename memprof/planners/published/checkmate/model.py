"""The mixed-integer programme of a reduced step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from memprof.planners.graph.solver import solve
from memprof.planners.published.checkmate.condensed import Blocks
from memprof.trace.schema import NONE, Floats

#: Relative gap to the bound at which the solver stops.
_GAP = 1e-6


@dataclass(frozen=True, eq=False)
class Solution:
    """The solver's result.

    Attributes:
        is_proved: Whether the solver finished: with the optimum, or with a proof of infeasibility.
        bound: Lower bound on the time of every solution; minus infinity where unknown.
        values: The best solution, shape ``(columns,)``; None without one.
    """

    is_proved: bool
    bound: float
    values: Floats | None


class Model:
    """Which nodes run again before which events, and which values are live in between.

    With e an event, k a node and v a value, R[e, k] is whether k runs again right before e, S[e, v] whether v is live
    after the event before e. Within an event's stage the nodes that run again do so in the step's order, and a value's
    liveness is carried along from one maker or reader to the next, so it is freed where it drops: this is Free[t, i, k]
    in the paper, and need not be an integer. Only R is; the rest follows from it.

    Source: Jain et al. 2020 (Checkmate: breaking the memory wall with optimal tensor rematerialization), section 4,
    equations 1 to 9. Our changes: liveness is carried along instead of freed by products, a node may make several
    values or reuse memory in place, events where nothing is read or made are left out.
    """

    def __init__(
        self,
        blocks: Blocks,
        budget_bytes: int,
        *,
        in_forward: bool,
        in_stage: bool,
        rounds: int = 1,
        only: Set[tuple[int, int]] | None = None,
        least_peak: bool = False,
    ) -> None:
        """Builds the programme.

        Args:
            blocks: The reduced step.
            budget_bytes: Peak live bytes allowed.
            in_forward: Whether nodes may run again before backward begins.
            in_stage: Whether memory also counts while nodes run again. Without it, this is a relaxation of every
                schedule, in whatever order and however often nodes run again.
            rounds: Passes over the nodes' order before an event: with one, the paper's form; with two, a node can run
                again twice for one event, or after nodes that follow it.
            only: Pairs of event and node that may run again before it, for a smaller programme; None for no limit.
            least_peak: Minimize the peak instead of the time.
        """
        self._blocks, self._in_stage, self._rounds, self._only = blocks, in_stage, rounds, only
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._factors: list[float] = []
        self._most: list[float] = []
        self._cost: list[float] = []
        self._is_whole: list[bool] = []
        self._top: list[float] = []
        self._scale = float(max(budget_bytes, 1))
        self._unit_us = max(sum(blocks.cost_us), 1e-9)
        self._least_peak = least_peak
        self._peak = self._column(cost=1.0 if least_peak else 0.0, top=math.inf if least_peak else 0.0)
        self.again: list[list[tuple[int, int]]] = []
        self.alive: list[dict[int, int]] = []
        self.is_possible = True
        self._write(in_forward)

    def solve(self, deadline: float, *, is_relaxed: bool = False) -> Solution:
        """Solves the programme, as far as time allows.

        Args:
            deadline: ``time.monotonic`` value at which the solver stops.
            is_relaxed: Solve the linear relaxation, whose objective is a bound.
        """
        if not self.is_possible:
            return Solution(is_proved=True, bound=math.inf, values=None)
        shape = (len(self._most), len(self._cost))
        matrix = csr_array((self._factors, (self._rows, self._columns)), shape=shape)
        done = solve(
            np.array(self._cost),
            [(matrix, -np.inf, np.array(self._most))],
            (0.0, np.array(self._top)),
            np.array([whole and not is_relaxed for whole in self._is_whole], dtype=np.int64),
            time_limit=max(deadline - time.monotonic(), 0.1),
            mip_rel_gap=_GAP,
        )
        unit = self._scale if self._least_peak else self._unit_us
        if done.status == 2:
            return Solution(is_proved=True, bound=math.inf, values=None)
        if done.x is None or (is_relaxed and done.status != 0):
            return Solution(is_proved=False, bound=-math.inf, values=None)
        # A linear programme has no bound besides its optimum.
        bound = done.fun if is_relaxed or done.mip_dual_bound is None else done.mip_dual_bound
        return Solution(done.status == 0, float(bound) * unit, np.asarray(done.x))

    def runs_again(self, values: Floats, least: float = 0.5) -> list[list[int]]:
        """Returns the nodes whose rerun variable exceeds a threshold before each event, in their order."""
        return [[node for node, column in row if values[column] > least] for row in self.again]

    def kept(self, values: Floats, event: int, least: float) -> set[int]:
        """Returns the values whose liveness before an event reaches a threshold."""
        return {value for value, column in self.alive[event].items() if values[column] >= least}

    def _column(self, *, cost: float = 0.0, top: float = 1.0, whole: bool = False) -> int:
        self._cost.append(cost)
        self._top.append(top)
        self._is_whole.append(whole)
        return len(self._cost) - 1

    def _at_most(self, terms: Iterable[tuple[int, float]], most: float) -> None:
        """Adds a row: a weighted sum of columns is at most a number."""
        kept = [(column, factor) for column, factor in terms if factor]
        if not kept:
            self.is_possible = self.is_possible and most >= -1e-12
            return
        for column, factor in kept:
            self._rows.append(len(self._most))
            self._columns.append(column)
            self._factors.append(factor)
        self._most.append(most)

    def _fits(self, terms: list[tuple[int, float]], beside_bytes: float) -> None:
        """Adds the row that live bytes stay within the budget, or within the minimized peak."""
        scaled = [(column, factor / self._scale) for column, factor in terms]
        if self._least_peak:
            self._at_most([*scaled, (self._peak, -1.0)], -beside_bytes / self._scale)
        elif sum(max(factor, 0.0) for _, factor in scaled) + beside_bytes / self._scale > 1.0:
            self._at_most(scaled, 1.0 - beside_bytes / self._scale)

    def _write(self, in_forward: bool) -> None:
        blocks = self._blocks
        last = blocks.last_use()
        turn = max((at for at, event in enumerate(blocks.events) if event.node != NONE), default=NONE)
        alive: dict[int, int] = {}
        has_run: list[int] = []
        for at, event in enumerate(blocks.events):
            self.alive.append(dict(alive))
            self.again.append([])
            carried: dict[int, int] = dict(alive)
            if in_forward or at > turn:
                carried = self._stage(at, has_run, alive, last)
            alive = self._event(at, carried, last)
            if event.node != NONE:
                has_run.append(event.node)

    def _stage(self, at: int, has_run: list[int], alive: dict[int, int], last: list[int]) -> dict[int, int]:
        """Adds the nodes that may run again before an event; returns the liveness columns after them."""
        blocks, now = self._blocks, dict(alive)
        beside = blocks.events[at].before_bytes
        for node in has_run * self._rounds:
            if all(last[value] < at for value in blocks.makes[node]):
                continue
            is_allowed = self._only is None or (at, node) in self._only
            if not is_allowed or any(value not in now for value in blocks.reads[node]):
                continue
            cost = 0.0 if self._least_peak else blocks.cost_us[node] / self._unit_us
            again = self._column(cost=cost, whole=True)
            self.again[at].append((node, again))
            for value in blocks.reads[node]:
                self._at_most([(again, 1.0), (now[value], -1.0)], 0.0)
            taken = {blocks.taken[value] for value in blocks.makes[node]} - {NONE}
            made: dict[int, int] = {}
            for value in blocks.makes[node]:
                made[value] = self._column()
                before = [(now[value], -1.0)] if value in now else []
                self._at_most([(made[value], 1.0), (again, -1.0), *before], 0.0)
                self._at_most([(again, 1.0), (made[value], -1.0)], 0.0)
            if self._in_stage:
                self._fit_run(node, again, {**now, **made}, taken, beside)
            now.update(made)
            for value in (*blocks.reads[node], *(blocks.makes[node] if len(made) > 1 else ())):
                if not self._in_stage:
                    continue
                now[value] = self._less(now[value])
                if value in taken:
                    self._at_most([(now[value], 1.0), (again, 1.0)], 1.0)
        return now

    def _less(self, column: int) -> int:
        """Adds the column of a value that may have been freed since."""
        later = self._column()
        self._at_most([(later, 1.0), (column, -1.0)], 0.0)
        return later

    def _fit_run(self, node: int, again: int, now: dict[int, int], taken: set[int], beside: int) -> None:
        blocks = self._blocks
        terms = [(column, float(blocks.size[value])) for value, column in now.items()]
        over = sum(blocks.size[value] for value in taken)
        terms.append((again, float(blocks.extra_bytes[node] - over)))
        self._fits(terms, beside)

    def _event(self, at: int, now: dict[int, int], last: list[int]) -> dict[int, int]:
        """Adds an event; returns the liveness columns after it."""
        blocks, event = self._blocks, self._blocks.events[at]
        made = blocks.makes[event.node] if event.node != NONE else ()
        taken = {blocks.taken[value] for value in made} - {NONE}
        for value in event.reads:
            if value in now:
                self._at_most([(now[value], -1.0)], -1.0)
            else:
                self.is_possible = False
        later: dict[int, int] = {}
        for value, column in now.items():
            if last[value] <= at or value in taken or value in made:
                continue
            later[value] = self._column() if value in event.reads else self._less(column)
        sure = {*event.reads, *made}
        beside = event.busy_bytes + sum(blocks.size[v] for v in sure) - sum(blocks.size[v] for v in taken)
        terms = [(column, float(blocks.size[value])) for value, column in later.items() if value not in sure]
        self._fits(terms, beside)
        later.update({value: self._column() for value in made if last[value] > at})
        return later
