"""What to keep and what to recompute across a few points of the step: a relaxation of every schedule.

Jain 2020 (Checkmate, section 4) decides for every stage what is kept and what runs again in it, and enforces the budget
everywhere. Here the budget is enforced only at some operators, the *cuts*; the stages between two cuts are merged into
one *window*. Every schedule within the budget satisfies this model, so its least time is a lower bound for all of them;
if the schedule read off its solution also keeps the budget at the other stages, that schedule is optimal. The model
grows cut by cut where its solutions exceed the budget: a step with hundreds of stages needs a few dozen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.solver import solve
from memprof.planners.published.auto.repeats import Repeat, Repeats
from memprof.trace.schema import NONE, Bools, Floats, Ints

#: A model with at most this many decisions is solved exactly, so on small steps a larger budget is never slower.
_SMALL_COLUMNS = 6_000
#: The solver's feasibility tolerance.
_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Solution:
    """The model's solution for one budget.

    Attributes:
        is_feasible: False where the model proves that no schedule keeps the budget at the cuts.
        bound_us: Lower bound on the time any schedule within the budget adds to the step.
        repeats: The repeats of the solution, each in the last stage of its window that still works; None where the
            solver found no solution in time.
        values: The solution vector, one number per decision; None without a solution.
    """

    is_feasible: bool
    bound_us: float
    repeats: tuple[Repeat, ...] | None = None
    values: Floats | None = None


class CutModel:
    """The model of one graph with one set of cuts."""

    def __init__(self, graph: Graph, cuts: list[int]) -> None:
        """Builds the constraints; only the right-hand sides depend on the budget.

        Args:
            graph: The step.
            cuts: Operators during which the budget is enforced, in order.
        """
        self._graph = graph
        self._cuts = cuts
        # What the recording holds until an operator counts as read by it.
        held = np.where(graph.value_freed_op == NONE, graph.ops, graph.value_freed_op)
        is_longer = held > graph.value_op
        self._read_op = np.concatenate([graph.read_op, held[is_longer]])
        self._read_value = np.concatenate([graph.read_value, np.flatnonzero(is_longer)])
        self._taker = np.full(graph.values, NONE, dtype=np.int64)
        heirs = np.flatnonzero(graph.taken_from != NONE)
        self._taker[graph.taken_from[heirs]] = graph.value_op[heirs]

        columns, windows = 0, len(cuts) + 1
        self._kept = np.full((len(cuts), graph.values), NONE, dtype=np.int64)
        self._again = np.full((windows, graph.ops), NONE, dtype=np.int64)
        for window in range(windows):
            op_ids = np.flatnonzero(self._may_repeat(window))
            self._again[window, op_ids] = np.arange(columns, columns + len(op_ids))
            columns += len(op_ids)
            if window < len(cuts):
                values = np.flatnonzero(graph.value_op < cuts[window])
                self._kept[window, values] = np.arange(columns, columns + len(values))
                columns += len(values)
        self.columns = columns

        self._cost_us = np.zeros(columns)
        again_in, again_op = np.nonzero(self._again != NONE)
        self._cost_us[self._again[again_in, again_op]] = graph.cost_us[again_op]
        self._lowest = np.zeros(columns)
        self._others_bytes = np.zeros(len(cuts), dtype=np.int64)
        for place, cut in enumerate(cuts):
            self._add_demand(place, cut)
        self._rules, self._rule_low = self._make_rules()
        kept_at, value = np.nonzero(self._kept != NONE)
        # Scaled so that all coefficients have similar magnitude.
        self._unit_bytes = max(1.0, float(graph.value_bytes.max(initial=1)) / 100.0)
        sizes = graph.value_bytes[value] / self._unit_bytes
        self._bytes = csr_array((sizes, (kept_at, self._kept[kept_at, value])), shape=(len(cuts), columns))

    def solve(
        self, budget_bytes: int, *, whole: bool, seconds: float, fixed: tuple[Bools, Floats] | None = None
    ) -> Solution:
        """Finds the least time within a budget.

        Args:
            budget_bytes: Most bytes at each cut.
            whole: Whether keep decisions are integers; fractional ones solve quickly and still give a bound.
            seconds: Time limit of the solver, which then returns its best solution.
            fixed: Which decisions are fixed, and the current values of all; the bound then holds only for the others.
        """
        lowest, highest = self._lowest, np.ones(self.columns)
        if fixed is not None:
            is_fixed, values = fixed
            lowest = np.where(is_fixed, np.maximum(lowest, values), lowest)
            highest = np.where(is_fixed, lowest, highest)
        room = (budget_bytes - self._others_bytes) / self._unit_bytes
        answer = solve(
            self._cost_us,
            [(self._rules, self._rule_low, np.inf), (self._bytes, -np.inf, room)],
            (lowest, highest),
            np.full(self.columns, int(whole)),
            time_limit=max(seconds, 0.1),
            mip_rel_gap=1e-4 if self.columns > _SMALL_COLUMNS else 0.0,
        )
        if answer.status == 2:  # scipy's status for infeasible
            return Solution(is_feasible=False, bound_us=0.0)
        bound_us = 0.0
        if whole and answer.mip_dual_bound is not None:
            bound_us = float(answer.mip_dual_bound)
        elif not whole and answer.status == 0:
            bound_us = float(answer.fun)
        repeats = None if answer.x is None else self._placed(answer.x > 0.5)
        return Solution(True, max(0.0, bound_us * (1.0 - _TOLERANCE)), repeats, answer.x)

    def decisions_of(self, state: Repeats) -> Floats:
        """Returns the decisions that lead to a schedule."""
        values = np.zeros(self.columns)
        for place, cut in enumerate(self._cuts):
            for value in np.flatnonzero(self._kept[place] != NONE).tolist():
                values[self._kept[place, value]] = state.is_kept(value, cut)
        for op_id, stage in state.repeats():
            column = self._again[np.searchsorted(self._cuts, stage), op_id]
            if column != NONE:
                values[column] = 1.0
        return values

    def decisions_on(self, op_ids: Bools) -> Bools:
        """Returns which decisions concern given operators and the values they make."""
        values = np.zeros(self.columns, dtype=np.bool_)
        window, op_id = np.nonzero(self._again != NONE)
        values[self._again[window, op_id]] = op_ids[op_id]
        place, value = np.nonzero(self._kept != NONE)
        values[self._kept[place, value]] = op_ids[self._graph.value_op[value]]
        return values

    def _window(self, window: int) -> tuple[int, int]:
        """Returns the cut before a window and the last operator in it."""
        first = self._cuts[window - 1] if window else NONE
        return first, self._cuts[window] if window < len(self._cuts) else self._graph.ops

    def _may_repeat(self, window: int) -> Bools:
        """Returns what can be recomputed in a window: what was made before it, and what is overwritten within it."""
        first, last = self._window(window)
        graph = self._graph
        makes_taken = np.zeros(graph.ops, dtype=np.bool_)
        makes_taken[graph.value_op[(self._taker != NONE) & (self._taker <= last)]] = True
        op_id = np.arange(graph.ops)
        makes = np.zeros(graph.ops, dtype=np.bool_)
        makes[graph.value_op] = True
        may: Bools = makes & graph.can_repeat & ((op_id <= first) | (makes_taken & (op_id < last)))
        return may

    def _add_demand(self, place: int, cut: int) -> None:
        """Records the memory a cut's operator needs in addition to the decided values."""
        graph = self._graph
        made = np.flatnonzero(graph.value_op == cut)
        taken = graph.taken_from[made]
        bytes_made = graph.value_bytes[made].sum() - graph.value_bytes[taken[taken != NONE]].sum()
        self._others_bytes[place] = graph.workspace_bytes[cut] + graph.floor_bytes[cut] + bytes_made
        read = self._kept[place, graph.read_value[graph.read_op == cut]]
        self._lowest[read[read != NONE]] = 1.0

    def _make_rules(self) -> tuple[csr_array, Floats]:
        """Builds the rows: each requires that a value that is read was kept or is recomputed."""
        graph, maker = self._graph, self._graph.value_op
        sources: list[Ints] = []
        remade: list[Ints] = []
        demands: list[Ints] = []
        for window in range(len(self._cuts) + 1):
            first, last = self._window(window)
            again = self._again[window]
            before = self._kept[window - 1] if window else np.full(graph.values, NONE, dtype=np.int64)
            # An operator of the window reads a value from before it.
            is_read = (self._read_op > first) & (self._read_op <= last) & (maker[self._read_value] < first)
            read = np.unique(self._read_value[is_read])
            sources.append(before[read])
            remade.append(again[maker[read]])
            demands.append(np.full(len(read), NONE))
            # A repeated operator reads a value from before the window.
            is_read = (again[graph.read_op] != NONE) & (maker[graph.read_value] < first)
            read = graph.read_value[is_read]
            sources.append(before[read])
            remade.append(again[maker[read]])
            demands.append(again[graph.read_op[is_read]])
            # A value is kept at the end of the window; one overwritten in the window must be recomputed.
            if window < len(self._cuts):
                is_taken = (self._taker > first) & (self._taker < last)
                value = np.flatnonzero((maker < first) | (is_taken & (maker < last)))
                sources.append(np.where(is_taken[value], NONE, before[value]))
                remade.append(again[maker[value]])
                demands.append(self._kept[window, value])
        source, again, demand = np.concatenate(sources), np.concatenate(remade), np.concatenate(demands)
        row = np.arange(len(source))
        parts = [(source, 1.0), (again, 1.0), (demand, -1.0)]
        rows = np.concatenate([row[column != NONE] for column, _ in parts])
        columns = np.concatenate([column[column != NONE] for column, _ in parts])
        signs = np.concatenate([np.full(int((column != NONE).sum()), sign) for column, sign in parts])
        rules = csr_array((signs, (rows, columns)), shape=(len(source), self.columns))
        return rules, np.where(demand == NONE, 1.0, 0.0)

    def _placed(self, chosen: Bools) -> tuple[Repeat, ...]:
        """Puts each repeat into the last stage of its window that still precedes all its readers."""
        graph = self._graph
        readers: list[list[int]] = [[] for _ in range(graph.ops)]
        for op_id, maker in zip(graph.read_op.tolist(), graph.value_op[graph.read_value].tolist(), strict=True):
            readers[maker].append(op_id)
        repeats: set[Repeat] = set()
        for window in range(len(self._cuts) + 1):
            first, last = self._window(window)
            last = min(last, graph.ops - 1)
            again = self._again[window]
            op_ids = np.flatnonzero(again != NONE)
            stage_of: dict[int, int] = {}
            for op_id in op_ids[chosen[again[op_ids]]][::-1].tolist():
                stages = [reader for reader in readers[op_id] if first < reader <= last]
                stages += [stage_of[reader] for reader in readers[op_id] if reader in stage_of]
                stage_of[op_id] = min(stages, default=last)
            repeats.update((op_id, stage) for op_id, stage in stage_of.items() if stage > op_id)
        return tuple(sorted(repeats))
