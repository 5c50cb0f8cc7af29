"""The search of the policy space: its invariants for any step."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from memprof.errors import InvariantError
from memprof.planners.search.explore import _fast_enough, explore
from memprof.planners.search.groups import are_apart, find_groups
from memprof.planners.search.request import SearchRequest
from memprof.planners.search.workbench import Workbench
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.interval import Interval
from memprof.policies.precision.policy import Precision
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE
from tests.planners.promises import step_named


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm"])
def test_best_plan_fits_and_a_larger_budget_is_never_slower(name: str) -> None:
    """At budgets from 85 down to 40 % the best plan, replayed anew, is within the budget; less room, no less time."""
    step = step_named(name)
    peak = int(live_bytes(step).during.max())
    before = 0.0
    for percent in (85, 60, 40):
        asked = SearchRequest(peak * percent // 100, ("checkpoint", "swap", "precision"), time_limit_s=280)
        answer = explore(step, asked)
        assert not answer.was_stopped
        if answer.best is None:
            assert answer.search_request.needed(answer.least) > peak * percent // 100
            break
        predicted = answer.best.plan.transform(step)
        assert live_bytes(predicted).during.max() == answer.best.peak_bytes <= peak * percent // 100
        assert predicted.duration_us == answer.best.step_time_us
        assert answer.best.step_time_us >= before
        before = answer.best.step_time_us


def test_a_simpler_plan_comes_first_only_where_no_smaller_budget_has_a_faster_one() -> None:
    """Two policies take 900 us within 50 bytes, or up to 1,091: one of 950 us comes first only if it needs less."""
    bench = Workbench(step_named("gpt"), deadline=time.monotonic() + 60)
    recorded = bench.try_plan()
    assert recorded is not None
    bench.archive[()] = recorded = dataclasses.replace(recorded, step_time_us=1000.0)

    def first(budget: int, *plans: tuple[tuple[Policy, ...], int, float]) -> float:
        for policies, size, time_us in plans:
            interval = Interval(size, size)
            bench.archive[policies] = dataclasses.replace(
                recorded, policies=policies, peak_bytes=size, step_time_us=time_us, interval=interval
            )
        return _fast_enough(bench, SearchRequest(budget))[0].step_time_us

    one, two = (ChunkedLoss(),), (OptimizerPolicy(loop="fused"), Checkpoint(modules=("blocks.*",)))
    # The simpler plan needs more: within 60 bytes it would be slower than what comes first within 50.
    assert [first(budget, (one, 60, 950.0), (two, 50, 900.0)) for budget in (50, 60)] == [900.0, 900.0]
    # It needs less: the faster plan of the larger budget is as slow as it, as far as is known.
    assert [first(budget, (one, 40, 950.0), (two, 50, 900.0)) for budget in (40, 50)] == [950.0, 950.0]


def test_answers_are_sorted_and_complete() -> None:
    """Plans that fit are in order of time; every other plan replayed is over the budget; none is in both."""
    step = step_named("resnet")
    peak = int(live_bytes(step).during.max())
    answer = explore(step, SearchRequest(peak // 2))
    times = [one.step_time_us for one in answer.fitting]
    assert times == sorted(times)
    assert all(one.interval.most_bytes <= peak // 2 for one in answer.fitting)
    assert all(one.interval.most_bytes > peak // 2 for one in answer.others)
    # The recording itself is no plan.
    assert len(answer.fitting) + len(answer.others) == answer.tried - 1


def test_interruption_keeps_the_best_so_far() -> None:
    """Ctrl-C ends the search with the results so far, and a message says so."""
    step = step_named("gpt")
    count = 0

    def interrupt(_: object) -> None:
        nonlocal count
        count += 1
        if count == 20:
            raise KeyboardInterrupt

    answer = explore(step, SearchRequest(int(live_bytes(step).during.max()) // 2), interrupt)
    assert answer.was_stopped
    assert answer.was_interrupted
    assert answer.tried == 20


def test_a_search_that_ends_by_itself_was_not_stopped() -> None:
    """It says so, how long it took, and how many plans it replayed."""
    step = step_named("lstm")
    answer = explore(step, SearchRequest(int(live_bytes(step).during.max()), allow=("checkpoint",)))
    assert answer.was_stopped is False
    assert answer.was_interrupted is False
    assert isinstance(answer.took_s, float)
    assert answer.took_s >= 0
    assert answer.best is not None
    assert answer.best.policies == ()


def test_time_limit_is_kept() -> None:
    """A search that has no time says that it was stopped."""
    step = step_named("gpt")
    answer = explore(step, SearchRequest(int(live_bytes(step).during.max()) // 2, time_limit_s=0.0))
    assert answer.was_stopped
    assert not answer.was_interrupted
    assert answer.best is None


def test_remat_is_the_last_resort() -> None:
    """It is tried where nothing else fits, with compatible policies; never where it is not allowed."""
    step = step_named("gpt")
    peak = int(live_bytes(step).during.max())
    search_request = SearchRequest(int(peak * 0.33), forbid=("swap", "precision"))
    found = explore(step, search_request)
    assert found.best is not None
    assert found.best.policies[-1].name == "remat"
    assert found.best.peak_bytes <= search_request.budget_bytes
    assert all(one.policies[-1].name == "remat" for one in found.fitting)
    assert explore(step, dataclasses.replace(search_request, forbid=(*search_request.forbid, "remat"))).best is None
    assert explore(step, SearchRequest(search_request.budget_bytes, allow=("checkpoint",))).best is None
    easy = explore(step, SearchRequest(int(peak * 0.6), forbid=("swap", "precision")))
    assert not any(policy.name == "remat" for one in easy.fitting for policy in one.policies)
    named = explore(step, SearchRequest(int(peak * 0.6), allow=("remat",)))
    assert named.best is not None
    assert [policy.name for policy in named.best.policies] == ["remat"]


def test_a_schedules_own_tensors_are_a_plan() -> None:
    """Beside the modules that a planner's schedule comes to stands the plan that names its saved tensors."""
    step = step_named("resnet")
    budget = int(live_bytes(step).during.max() * 0.7)
    found = explore(step, SearchRequest(budget, planner="dtr"))
    assert any(policy.name == "remat" and policy.recompute for one in found.fitting for policy in one.policies)


@pytest.mark.parametrize("planner", ["sqrt", "selective", "chain", "dtr"])
def test_named_planner_chooses_the_modules(planner: str) -> None:
    """A plan that follows a planner's schedule fits, and the result has the figures of the schedule itself."""
    step = step_named("gpt")
    budget = int(live_bytes(step).during.max()) * 6 // 10
    answer = explore(step, SearchRequest(budget, forbid=("remat",), planner=planner))
    assert answer.schedule is not None
    assert answer.schedule.planner == planner
    assert 0 < answer.schedule.peak_bytes <= budget
    assert answer.best is not None
    assert {policy.name for policy in answer.best.policies} == {"checkpoint"}


def test_groups_of_the_sample() -> None:
    """Repeated modules are one group by their pattern; a module inside others is a group of its own."""
    groups = {group.pattern: group for group in find_groups(step_named("gpt"))}
    assert groups["layers.*"].members == ("layers.0", "layers.1", "layers.2", "layers.3")
    assert groups["layers.*"].is_whole
    layers = groups["layers.*"].members
    assert groups["layers.*"].pattern_for(layers) == ("layers.*",)
    assert groups["layers.*"].pattern_for(layers[:2]) == ("layers.0", "layers.1")
    assert not are_apart(layers, groups["layers.*.mlp"].members)
    assert are_apart(groups["layers.*.attention"].members, groups["layers.*.mlp"].members)
    saved = sum(groups[pattern].saved_bytes for pattern in ("layers.*.mlp", "layers.*.attention"))
    assert saved <= groups["layers.*"].saved_bytes


def test_module_may_stand_before_the_one_that_holds_it() -> None:
    """A job may wrap what it made: the groups are the same in whatever order the modules are listed."""
    step = step_named("gpt")
    modules = step.modules
    order = np.arange(len(modules))[::-1]
    place = np.append(np.argsort(order), NONE)  # NONE, -1, stays the last
    turned = dataclasses.replace(
        step,
        modules=modules.take(order).replace(
            module_id=np.arange(len(modules)), parent_id=place[modules.parent_id[order]]
        ),
        ops=step.ops.replace(module_id=place[step.ops.module_id]),
        storages=step.storages.replace(module_id=place[step.storages.module_id]),
        saved=step.saved.replace(module_id=place[step.saved.module_id]),
        module_calls=step.module_calls.replace(module_id=place[step.module_calls.module_id]),
    )
    assert {group.pattern for group in find_groups(turned)} == {group.pattern for group in find_groups(step)}


def test_a_plan_that_goes_wrong_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one policy's prediction is inconsistent, its plans are refused with the reason, and the others are found."""

    def fail(self: Precision, step: object) -> object:
        raise InvariantError("Step 3 is inconsistent: made up.")

    monkeypatch.setattr(Precision, "transform", fail)
    step = step_named("gpt")
    answer = explore(step, SearchRequest(int(live_bytes(step).during.max()) * 7 // 10))
    assert answer.best is not None
    assert all(policy.name != "precision" for one in answer.fitting for policy in one.policies)
    assert any("internal error of memprof" in reason for what, reason in answer.refused if "precision" in what)
