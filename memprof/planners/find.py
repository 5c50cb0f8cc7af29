"""The entry point to all planners."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from memprof.errors import UsageError
from memprof.planners.base import ScheduleRequest, ScheduleResult, named_planner
from memprof.planners.graph.graph import Graph, graph_of
from memprof.planners.graph.moves import Moves
from memprof.planners.graph.project import project
from memprof.planners.graph.schedule import replay, scheduled_step
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.explore import explore
from memprof.planners.search.groups import find_groups
from memprof.planners.search.request import SearchRequest
from memprof.planners.search.workbench import Workbench
from memprof.policies.plan.plan import Plan
from memprof.trace.schema import Ints
from memprof.trace.step import Step

#: Share of the time in which the schedule is searched; the rest is for the plan.
_SCHEDULE_SHARE = 0.8


@dataclass(frozen=True, eq=False)
class PlannerResult:
    """A planner's result, as a schedule and as a plan.

    A *schedule* lists when and how often each operator runs; it is what the papers' algorithms find, and a lower bound
    on what an unmodified job can reach. A *plan* is a choice of policies that can be applied.

    Attributes:
        planner: Name of the planner.
        budget_bytes: The budget searched for.
        status: How the schedule search ended, one of planners.base.STATUSES.
        reason: One sentence that explains the status.
        runs: The schedule; None where none fits.
        moves: Values the schedule offloads to host memory; None for none.
        schedule_peak_bytes: Its replayed peak; 0 without a schedule.
        schedule_time_us: Its step time, waits for copies included; 0 without a schedule.
        bound_us: Lower bound on the step time of any schedule that fits; 0 where unknown.
        least_bytes: Smallest budget for which the planner would find a schedule; 0 where unknown.
        plan: The fastest fitting plan derived from the schedule, with its prediction and the budget; None for none.
        predicted: The step under that plan.
        took_s: Duration of the search.
    """

    planner: str
    budget_bytes: int
    status: str
    reason: str
    runs: Ints | None
    moves: Moves | None
    schedule_peak_bytes: int
    schedule_time_us: float
    bound_us: float
    least_bytes: int
    plan: Plan | None
    predicted: Step | None
    took_s: float
    _step: Step = dataclasses.field(repr=False)
    _graph: Graph = dataclasses.field(repr=False)

    def scheduled(self) -> Step | None:
        """Returns the step under the schedule; None without a schedule."""
        return None if self.runs is None else scheduled_step(self._step, self._graph, self.runs, self.moves)


def find_plan(
    step: Step,
    budget_bytes: int,
    *,
    planner: str = "auto",
    time_limit_s: float = 60.0,
    link_bytes_per_us: float = 0.0,
) -> PlannerResult:
    """Searches for the fastest way to run a step within a budget.

    Args:
        step: A recorded step, or one built by ``planners.arrays.step_from_arrays``.
        budget_bytes: Most bytes that may be allocated at once.
        planner: Name of the planner; see ``planners.base.PLANNERS``.
        time_limit_s: Time after which the search stops and returns its best result.
        link_bytes_per_us: Bandwidth to host memory, for the planners that swap: ``swap`` and ``auto``.

    Raises:
        UsageError: Unknown planner, or the budget is not positive.
    """
    started = time.monotonic()
    kind = named_planner(planner)
    if budget_bytes <= 0:
        raise UsageError(f"invalid budget of {budget_bytes} bytes: must be positive.")
    graph = graph_of(step)
    task = ScheduleRequest(graph, budget_bytes, deadline=started + time_limit_s, link_bytes_per_us=link_bytes_per_us)
    share = _SCHEDULE_SHARE if len(step.modules) else 1.0
    found = kind().search(dataclasses.replace(task, deadline=started + share * time_limit_s))
    done = None if found.runs is None else replay(graph, found.runs, found.moves)
    chosen = _plan(step, graph, found, task, planner)
    plan, predicted = (None, None)
    if chosen is not None:
        plan, predicted = dataclasses.replace(chosen.plan, budget_bytes=budget_bytes).predict(step)
    return PlannerResult(
        planner=planner,
        budget_bytes=budget_bytes,
        status=found.status,
        reason=found.reason,
        runs=found.runs,
        moves=found.moves,
        schedule_peak_bytes=0 if done is None else done.peak_bytes,
        schedule_time_us=0.0 if done is None else graph.duration_us + done.extra_us + done.stall_us,
        bound_us=graph.duration_us + found.bound_us,
        least_bytes=found.least_bytes,
        plan=plan,
        predicted=predicted,
        took_s=time.monotonic() - started,
        _step=step,
        _graph=graph,
    )


def _plan(step: Step, graph: Graph, found: ScheduleResult, task: ScheduleRequest, planner: str) -> Candidate | None:
    """Chooses applicable policies: checkpointing that follows the schedule; for auto, the best plan available."""
    groups = find_groups(step) if len(step.modules) else []
    bench = Workbench(step, deadline=task.deadline)
    recorded = bench.try_plan()
    if recorded is None or recorded.peak_bytes <= task.budget_bytes:
        return recorded
    candidates = [] if found.runs is None else [project(bench, graph, found, groups, task.budget_bytes)]
    if planner == "auto" and groups:
        search_request = SearchRequest(
            task.budget_bytes,
            allow=("checkpoint", "swap") if task.link_bytes_per_us else ("checkpoint",),
            time_limit_s=max(1.0, task.deadline - time.monotonic()),
        )
        candidates.append(explore(step, search_request).best)
    fitting = [one for one in candidates if one is not None]
    return min(fitting, key=lambda one: one.step_time_us, default=None)
