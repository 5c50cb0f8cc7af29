"""All planners: their entry and invariants, stored results, and steps that policies have rewritten."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import memprof
from memprof.cli.main import main
from memprof.errors import UsageError
from memprof.planners import base
from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult, planner_types
from memprof.planners.find import find_plan
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.graph.choices import Choices
from memprof.planners.graph.graph import graph_of
from memprof.planners.graph.project import project
from memprof.planners.graph.schedule import replay
from memprof.planners.graph.writing import Demand
from memprof.planners.published.dtr import Dtr
from memprof.planners.search.groups import find_groups
from memprof.planners.search.workbench import Workbench
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.precision.policy import Precision
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.planners import graphs
from tests.planners.golden import PATH, SOLVED, UPDATE, cases, differences, graph_named, reached
from tests.planners.promises import SMALL, check_answers, check_planner, peak_bytes, step_named

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


def test_a_step_of_four_operators_by_hand() -> None:
    """Outputs live to their last reader, fixed bytes throughout, workspace while its operator runs."""
    step = step_from_arrays(
        time_us=[1.0, 2.0, 3.0, 4.0],
        output_bytes=[100, 50, 20, 10],
        inputs=[[], [0], [1], [0, 2]],
        is_backward=[False, False, True, True],
        workspace_bytes=[0, 7, 0, 0],
        fixed_bytes=1000,
    )
    assert live_bytes(step).during.tolist() == [1100, 1157, 1170, 1130]
    assert step.duration_us == 10.0
    graph = graph_of(step)
    assert graph.can_repeat.tolist() == [True, True, False, False]
    assert graph.is_saved().tolist() == [True, True]


def test_views_have_no_bytes_of_their_own() -> None:
    """A view keeps what it looks at alive; who reads it reads that."""
    step = step_from_arrays(
        time_us=[1.0] * 4,
        output_bytes=[100, 999, 10, 10],
        inputs=[[], [0], [1], [1, 2]],
        is_backward=[False, False, False, True],
        view_of=[-1, 0, -1, -1],
    )
    assert live_bytes(step).during.tolist() == [100, 100, 110, 120]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"output_bytes": [1]}, "output_bytes has 1 entries"),
        ({"inputs": [[], [1]]}, "operator 1 reads the output of operator 1"),
        ({"time_us": [1.0, float("nan")]}, "must not be negative"),
        ({"fixed_bytes": -1}, "must not be negative"),
        ({"in_place": [-1, 0], "view_of": [-1, 0]}, "is both a view and in place"),
    ],
)
def test_arrays_that_make_no_step_are_refused(changes: dict[str, object], sentence: str) -> None:
    """One sentence says which entry is wrong."""
    arrays: dict[str, object] = {
        "time_us": [1.0, 2.0],
        "output_bytes": [10, 20],
        "inputs": [[], [0]],
        "is_backward": [False, True],
    }
    with pytest.raises(UsageError, match=sentence):
        step_from_arrays(**{**arrays, **changes})  # type: ignore[arg-type]


SAMPLE = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"


class EveryNth(Planner):
    """Keeps every n-th of the values that backward needs."""

    name: ClassVar[str] = "every_nth"
    source: ClassVar[str] = "an example, not a paper"
    summary: ClassVar[str] = "keeps every n-th saved value"

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        choices = Choices(task)
        if choices.is_met:
            return choices.met()
        saved = np.flatnonzero(task.graph.is_saved())
        for n in range(1, 20):
            dropped = np.zeros(task.graph.values, dtype=bool)
            dropped[np.delete(saved, np.s_[::n])] = True
            choices.add(replay(task.graph, Demand(task.graph).schedule(dropped)), f"keeps every {n}-th saved value")
        return choices.found()


@pytest.mark.parametrize("step", SMALL)
@pytest.mark.parametrize("kind", planner_types(), ids=lambda kind: kind.name)
def test_every_planner_keeps_its_promises(kind: type[Planner], step: str) -> None:
    """Within the budget by the replay, monotone in it, and nothing called infeasible that is not."""
    check_planner(kind, step)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), operators=st.integers(1, 20), link=st.sampled_from([0.0, 5.0, 2000.0]))
@example(seed=2930, operators=16, link=0.0)  # DTR named a budget in which it then evicted too little
def test_quick_planners_keep_them_on_any_graph(seed: int, operators: int, link: float) -> None:
    """So do all but those that solve a program, whatever the graph."""
    for kind in planner_types():
        if kind.name not in SOLVED:
            check_answers(kind(), graphs.random_graph(operators, seed), (1.0, 0.8, 0.65, 0.45), link=link)


def test_a_planner_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is among those that are held to the promises, found by its name, offered, compared and explained."""
    monkeypatch.setattr(base, "PLANNERS", [*base.PLANNERS, f"{__name__}:EveryNth"])
    kind = planner_types()[-1]
    assert kind.name == "every_nth"
    for step in SMALL:
        check_planner(kind, step)
    found = memprof.find_plan(step_named("gpt"), 60 << 20, planner="every_nth")
    assert found.runs is not None
    assert found.schedule_peak_bytes <= 60 << 20
    words = ["suggest", str(SAMPLE), "--budget", "60MiB", "--allow", "checkpoint", "--planner"]
    assert main([*words, "every_nth"]) in (0, 4)
    assert "every_nth, recomputing single operators: peak " in capsys.readouterr().out
    assert main([*words, "every_mth"]) == 2
    assert "did you mean 'every_nth'?" in capsys.readouterr().err


def test_an_entry_that_is_no_planner_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong line of the registry fails where it is read."""
    monkeypatch.setattr(base, "PLANNERS", ["memprof.planners.base:ScheduleRequest"])
    with pytest.raises(AssertionError, match="base:ScheduleRequest is not a planner"):
        planner_types()


GOLDEN = json.loads(PATH.read_text())


@pytest.mark.parametrize(("step", "planner"), cases())
def test_results_are_as_before(step: str, planner: str) -> None:
    """Status, peak, extra time and least budget are those of golden.json."""
    known, found = GOLDEN[f"{step}, {planner}"], reached(step, planner)
    changed = [
        f"{step}, {planner} at {share} of the peak: {line}"
        for share, figures in found.items()
        for line in differences(known[share], figures, planner)
    ]
    assert known.keys() == found.keys()
    peak = peak_bytes(graph_named(step))
    assert all(figures.get("peak_bytes", 0) <= peak * float(share[:-1]) / 100 for share, figures in found.items())
    assert not changed, "\n".join([*changed, f"If this is meant, update golden.json with `{UPDATE}` and commit it."])


def test_every_planner_is_held_to_results() -> None:
    """The file has the cases of every planner, and no others; each planner has a schedule for some budget."""
    assert set(GOLDEN) == {f"{step}, {planner}" for step, planner in cases()}
    with_schedule = {
        name.partition(", ")[2] for name, answers in GOLDEN.items() for one in answers.values() if "extra_time" in one
    }
    assert with_schedule == {kind.name for kind in planner_types()}


LSTM = Path(__file__).parents[2] / "sample_traces" / "lstm" / "run.memprof"


#: The hidden state of the step before is freed in forward, once a cast of it exists; the second micro-batch reads what
#: the first has kept.
POLICIES = (Precision("bf16"), Accumulate(2))


@cache
def predicted(policy: Policy) -> Step:
    return policy.transform(Trace.open(LSTM).steady_step())


@pytest.mark.parametrize("planner", ["sqrt", "bptt", "chain", "dtr"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_schedule_of_a_predicted_step_is_one_of_the_step(policy: Policy, planner: str) -> None:
    """It is found, by the chain planner always, or its absence explained; its replay has the promised peak, and every
    tensor it reads is there.
    """
    step = predicted(policy)
    start, peak = step.bytes_at_start(), int(live_bytes(step).during.max())
    found = find_plan(step, start + (peak - start) * 8 // 10, planner=planner, time_limit_s=10)
    scheduled = found.scheduled()
    assert found.reason
    assert scheduled is not None or planner != "chain"
    if scheduled is not None:
        scheduled.check_lives()
        assert int(live_bytes(scheduled).during.max()) == found.schedule_peak_bytes
