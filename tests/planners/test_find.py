"""The common entry of all planners: its results for recordings and for graphs from arrays."""

from __future__ import annotations

import time

import pytest

import memprof
from memprof.errors import UsageError
from memprof.planners.base import ScheduleRequest, planner_types
from memprof.planners.graph.graph import graph_of
from memprof.planners.graph.project import project
from memprof.planners.published.dtr import Dtr
from memprof.planners.search.groups import find_groups
from memprof.planners.search.workbench import Workbench
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.replay.live import live_bytes
from tests.planners.promises import step_named

PLANNERS = [kind.name for kind in planner_types()]


@pytest.mark.parametrize("planner", PLANNERS)
def test_schedule_and_plan_are_replayed(planner: str) -> None:
    """The schedule's step and the plan's step have the peaks and times that the finding names, within the budget."""
    step = step_named("gpt")
    budget = int(live_bytes(step).during.max()) * 7 // 10
    found = memprof.find_plan(step, budget, planner=planner, time_limit_s=10.0)
    assert found.planner == planner
    assert found.reason
    scheduled = found.scheduled()
    if scheduled is not None:
        assert live_bytes(scheduled).during.max() == found.schedule_peak_bytes <= budget
        assert scheduled.duration_us == pytest.approx(found.schedule_time_us)
        assert found.bound_us <= found.schedule_time_us * (1 + 1e-9)
    if found.plan is not None:
        assert found.predicted is not None
        assert found.plan.prediction is not None
        assert live_bytes(found.predicted).during.max() == found.plan.prediction.peak_allocated_bytes <= budget
    assert scheduled is not None or found.status in ("nothing found", "time limit")


@pytest.mark.parametrize("planner", PLANNERS)
def test_smallest_step_has_an_answer(planner: str) -> None:
    """One operator: it fits or it does not, and every planner says which."""
    step = memprof.step_from_arrays(time_us=[1.0], output_bytes=[10], inputs=[[]], is_backward=[False])
    assert memprof.find_plan(step, 10, planner=planner, time_limit_s=5.0).status == "optimal"
    assert memprof.find_plan(step, 5, planner=planner, time_limit_s=5.0).status in ("infeasible", "nothing found")


def test_budget_that_is_met_is_no_plan() -> None:
    """Nothing runs again, and the plan has no policies."""
    step = step_named("gpt")
    found = memprof.find_plan(step, 1 << 30)
    assert found.status == "optimal"
    assert found.schedule_time_us == pytest.approx(step.duration_us)
    assert found.plan is not None
    assert found.plan.policies == ()


def test_swapped_values_become_a_swap_policy() -> None:
    """What a schedule moves to host memory, the plan moves too: some policy of it is no checkpoint."""
    step = step_named("gpt")
    budget = int(live_bytes(step).during.max()) * 7 // 10
    found = memprof.find_plan(step, budget, planner="swap", link_bytes_per_us=12e3)
    assert found.plan is not None
    assert any(not isinstance(policy, Checkpoint) for policy in found.plan.policies)


@pytest.mark.parametrize("share", [80, 50])
def test_plans_keep_the_calls_that_the_schedule_does_not_repeat(share: int) -> None:
    """Such a plan is faster than one that repeats whole modules."""
    step = step_named("gpt")
    budget = int(live_bytes(step).during.max()) * share // 100
    bench = Workbench(step, deadline=time.monotonic() + 60)
    graph, groups = graph_of(step), find_groups(step)
    found = Dtr().search(ScheduleRequest(graph, budget))
    plan = project(bench, graph, found, groups, budget)
    assert plan is not None
    assert bench.needed(plan) <= budget
    kept = [policy.keep for policy in plan.policies if isinstance(policy, Checkpoint)]
    assert any("#" in entry for entries in kept for entry in entries)
    whole = [one for one in bench.fitting(budget) if not any(getattr(policy, "keep", ()) for policy in one.policies)]
    assert whole
    assert all(plan.step_time_us < other.step_time_us for other in whole)


def test_graph_from_arrays_has_a_schedule_and_no_plan() -> None:
    """A graph without modules is planned for by its operators."""
    step = memprof.step_from_arrays(
        time_us=[10, 20, 5, 40, 20],
        output_bytes=[4096, 4096, 4096, 64, 64],
        inputs=[[], [0], [1], [1, 2], [0, 3]],
        is_backward=[False, False, False, True, True],
    )
    assert live_bytes(step).during.max() == 12_352
    found = memprof.find_plan(step, 9_000)
    assert found.runs is not None
    # The first output is needed last: it is made again.
    assert found.runs.tolist() == [0, 1, 2, 3, 0, 4]
    assert found.schedule_peak_bytes <= 9_000
    assert found.plan is None


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [({"planner": "greedy"}, "unknown planner 'greedy'"), ({"budget_bytes": 0}, "must be positive")],
)
def test_mistakes_are_sentences(asked: dict[str, object], sentence: str) -> None:
    """An unknown planner, and a budget of nothing."""
    with pytest.raises(UsageError, match=sentence):
        memprof.find_plan(step_named("gpt"), **{"budget_bytes": 1000, **asked})  # type: ignore[arg-type]
