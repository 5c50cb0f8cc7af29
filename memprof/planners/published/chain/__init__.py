"""Optimal persistent schedules for heterogeneous chains of stages (rotor)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import ClassVar

import numpy as np

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.choices import Choices
from memprof.planners.graph.graph import Graph
from memprof.planners.graph.schedule import as_recorded, replay
from memprof.planners.graph.stages import Line, lines_of
from memprof.planners.graph.writing import Walk
from memprof.planners.published.chain.options import stage_costs
from memprof.planners.published.chain.table import Table, grid_of
from memprof.trace.schema import Ints

#: Values read further away than this many value-making operators are kept; the first attempt keeps none.
_WIDEST = (None, 8)

#: At most this many schedules are replayed in each attempt.
_MOST_SCHEDULES = 80

#: Maximum number of stages in each attempt, as a share of all: with fewer, larger stages, more of what a stage keeps is
#: chosen inside it, across values that would belong to neighbours.
_SHARES = (1.0, 0.5, 0.35, 0.25)

#: Longer chains are merged to this many stages: the table grows with the cube.
_MOST_STAGES = 100


class Chain(Planner):
    """Solves a step as a chain of stages, each with a choice of what it keeps.

    All budgets are solved at once, and the fastest schedule whose replay fits is returned. The replay corrects for
    rounding sizes up to slots, and a larger budget never gives a slower schedule.

    Source: Beaumont et al. 2020 (Optimal checkpointing for heterogeneous chains: how to train deep neural networks with
    limited memory), sections 3 and 4. Optimal among schedules that hold each kept value until its backward.
    """

    name: ClassVar[str] = "chain"
    source: ClassVar[str] = "Beaumont et al. 2020 (rotor), sections 3 and 4; stage options as in Zhao et al. 2023"
    summary: ClassVar[str] = "cuts the step into stages and solves what each keeps by dynamic programming"

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Searches for the fastest schedule within the budget."""
        choices = Choices(task)
        if choices.is_met:
            return choices.met()
        for runs in _schedules(task.graph, choices.is_late):
            choices.add(replay(task.graph, runs), "recomputes stages of the chain")
        return choices.found()


def _schedules(graph: Graph, is_late: Callable[[], bool]) -> Iterator[Ints]:
    """Yields the best schedules of a step cut into stages, largest budget first, until the deadline.

    They do not depend on the requested budget. Rounds of forward and backward are solved one by one.
    """
    peak_bytes = replay(graph, as_recorded(graph)).peak_bytes
    seen: set[tuple[int, ...]] = set()
    for widest, share in product(_WIDEST, _SHARES):
        most = max((len(line.stages) for line in lines_of(graph, widest=widest)), default=0)
        lines = lines_of(graph, widest=widest, most_stages=min(math.ceil(most * share), _MOST_STAGES))
        cuts = tuple(stage.first_op for line in lines for stage in line.stages)
        if not lines or cuts in seen:
            continue
        seen.add(cuts)
        try:
            tables = _tables(graph, lines, peak_bytes, is_late)
        except TimeoutError:
            return
        for budget in _steps(tables):
            if is_late():
                return
            walk = Walk(graph)
            for table in tables:
                table.walk(walk, max(budget, table.least_bytes))
            yield walk.runs()


def _tables(graph: Graph, lines: list[Line], peak_bytes: int, is_late: Callable[[], bool]) -> list[Table]:
    tables = []
    for line in lines:
        costs = stage_costs(graph, line, is_late)
        tables.append(Table(line, costs, grid_of(line, costs, peak_bytes), is_late))
    return tables


def _steps(tables: list[Table]) -> list[int]:
    """Returns the budgets at which a faster schedule becomes possible, largest first, limited in number."""
    steps = np.unique(np.concatenate([table.steps() for table in tables]))[::-1]
    chosen = np.linspace(0, len(steps) - 1, min(len(steps), _MOST_SCHEDULES), dtype=np.int64)
    return [int(steps[row]) for row in np.unique(chosen)]
