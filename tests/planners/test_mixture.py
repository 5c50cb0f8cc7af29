"""Mixtures of choices for modules: effects are exact, the knapsack problem is solved, and the mixture is best."""

from __future__ import annotations

import dataclasses
import itertools
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from memprof.planners.search.candidate import Candidate
from memprof.planners.search.effects import Effects, Option, Windows, find_options, in_order, merged, shorter
from memprof.planners.search.explore import explore
from memprof.planners.search.groups import Group, around, find_groups
from memprof.planners.search.knapsack import Knapsack
from memprof.planners.search.measure import measure_effects
from memprof.planners.search.mixture import Mixture
from memprof.planners.search.request import SearchRequest, SearchResult
from memprof.planners.search.select import Selection
from memprof.planners.search.workbench import SAME_TIME, Workbench, rank, shortest
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.registry import policy_types
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from memprof.trace.schema import Memory
from memprof.trace.step import Step
from tests.planners.promises import step_named
from tests.recorder.recorded import record

SAMPLES = ("gpt", "resnet", "lstm")


def bench_of(step: Step) -> Workbench:
    bench = Workbench(step, deadline=time.monotonic() + 300)
    bench.try_plan()
    return bench


#: What is searched for is kept in the process.
pytestmark = pytest.mark.xdist_group("mixture")


@cache
def effects_of(name: str) -> tuple[Workbench, Effects]:
    step = step_named(name)
    bench = bench_of(step)
    effects = measure_effects(bench, (), find_options(step, [Checkpoint, Swap]))
    assert effects is not None
    return bench, effects


@cache
def found_for(name: str, percent: int, allow: tuple[str, ...]) -> SearchResult:
    step = step_named(name)
    return explore(step, SearchRequest(int(live_bytes(step).during.max()) * percent // 100, allow=allow))


@pytest.mark.parametrize("name", SAMPLES)
def test_effects_on_all_modules_add_up_to_the_replayed_step(name: str) -> None:
    """At every moment: dividing an option's effect among modules loses and invents nothing."""
    bench, effects = effects_of(name)
    for row, option in enumerate(effects.options):
        columns = effects.columns_of(row)
        under = bench.steps_under(option.policies)[0]
        assert effects.peak(columns) == pytest.approx(live_bytes(under).during.max(), abs=1)
        assert effects.cost_us[columns].sum() == pytest.approx(under.duration_us - bench.step.duration_us)


@pytest.mark.parametrize("name", SAMPLES)
def test_effects_on_one_module_are_those_of_a_replay(name: str) -> None:
    """Most single choices, replayed alone, peak where the measured effects say, within 2 % of the step's peak."""
    bench, effects = effects_of(name)
    peak = live_bytes(bench.step).during.max()
    errors = []
    for column in range(0, len(effects.modules), 3):
        chosen = np.array([column])
        found = bench.try_plan(*effects.policies(chosen))
        if found is not None:
            errors.append(abs(found.peak_bytes - effects.peak(chosen)) / peak)
    assert len(errors) > len(effects.modules) // 4
    assert np.quantile(errors, 0.9) < 0.02


def problem(random: np.random.Generator, columns: int, moments: int) -> Effects:
    """Makes up a small problem: modules with parts, a few options for each."""
    names = ["a", "a.x", "a.y", "b", "b.x", "c"]
    modules = tuple(random.choice(names, columns).tolist())
    group = Group("*", tuple(names), 0, 0.0, (), is_whole=False)
    options = tuple(Option((Checkpoint,), group, (name,), np.zeros(1, dtype=np.int64)) for name in modules)
    return Effects(
        frame=(),
        options=options,
        option_of=np.arange(columns),
        modules=modules,
        moments=np.arange(moments),
        live=random.integers(500, 1000, moments),
        freed=random.integers(-50, 300, (moments, columns)).astype(np.float64),
        cost_us=random.uniform(1.0, 100.0, columns),
        copy_us=np.zeros(columns),
        host_bytes=np.zeros(columns),
        windows=Windows(np.zeros((0, columns)), np.zeros(0)),
    )


def is_apart(effects: Effects, chosen: tuple[int, ...]) -> bool:
    names = [effects.modules[column] for column in chosen]
    return not any(one in around(two) or two in around(one) for one, two in itertools.combinations(names, 2))


@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_choices_are_those_of_trying_all(seed: int) -> None:
    """On small problems: within the solver's tolerance, within the allowance, and one choice for each module."""
    effects = problem(np.random.default_rng(seed), columns=9, moments=7)
    allowance = float(np.quantile(effects.live, 0.4))
    costs = [
        float(effects.cost_us[list(chosen)].sum())
        for count in range(7)
        for chosen in itertools.combinations(range(9), count)
        if is_apart(effects, chosen) and effects.peak(np.array(chosen, dtype=np.int64)) <= allowance
    ]
    found = Knapsack(effects).choose(effects.cost_us, effects.live.astype(np.float64) - allowance)
    if found is None:
        assert not costs
        return
    assert is_apart(effects, tuple(found.tolist()))
    assert effects.peak(found) <= allowance + 1e-6
    assert min(costs) <= effects.cost_us[found].sum() <= min(costs) * 1.011
    slack = 0.2 * min(costs)
    sooner = Knapsack(effects, slack).choose(effects.cost_us, effects.live.astype(np.float64) - allowance)
    assert sooner is not None
    assert is_apart(effects, tuple(sooner.tolist()))
    assert effects.cost_us[sooner].sum() <= min(costs) + slack + 1e-6


def test_copies_that_take_longer_than_a_window_are_paid_for() -> None:
    """Moving both of two tensors in one window costs the time that is missing; one of them costs nothing."""
    effects = problem(np.random.default_rng(0), columns=3, moments=1)
    copying = Effects(
        frame=(),
        options=effects.options,
        option_of=effects.option_of,
        modules=("a.x", "a.y", "c"),
        moments=effects.moments,
        live=np.array([300]),
        freed=np.array([[100.0, 100.0, 100.0]]),
        cost_us=np.array([0.0, 0.0, 30.0]),
        copy_us=np.array([50.0, 50.0, 0.0]),
        host_bytes=np.array([64.0, 64.0, 0.0]),
        windows=Windows(np.array([[50.0, 50.0, 0.0]]), np.array([60.0])),
    )
    knapsack, live = Knapsack(copying), copying.live.astype(np.float64)
    one, two = (knapsack.choose(copying.cost_us, live - allowance) for allowance in (200.0, 100.0))
    assert one is not None
    assert two is not None
    assert one.tolist() in ([0], [1])
    assert two.tolist() in ([0, 2], [1, 2])  # 30 us of recompute, where the second copy would wait for 40
    knapsack.host_room = 63.0
    cramped = knapsack.choose(copying.cost_us, live - 200.0)
    assert cramped is not None
    assert cramped.tolist() == [2]  # neither copy has room on the host


@pytest.mark.parametrize("name", ["gpt", "resnet"])
@pytest.mark.parametrize("percent", [85, 70, 60])
def test_a_mixture_fits_and_no_single_choice_is_faster(name: str, percent: int) -> None:
    """Whatever one policy for a group, or for its first members, achieves, the search achieves."""
    step = step_named(name)
    found = found_for(name, percent, ("checkpoint", "swap"))
    assert found.best is not None
    assert live_bytes(found.best.plan.transform(step)).during.max() == found.best.peak_bytes
    bench = bench_of(step)
    for option in find_options(step, [Checkpoint, Swap]):
        for count in range(1, len(option.members) + 1):
            one = bench.try_plan(*option.make(option.members[:count]))
            if one is not None and one.interval.most_bytes <= found.search_request.budget_bytes:
                assert found.best.step_time_us <= one.step_time_us * 1.002 * SAME_TIME


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("percent", [80, 60])
def test_no_policy_that_predict_accepts_is_faster(name: str, percent: int) -> None:
    """Each default policy with its own candidates: none fits and is faster than what is proposed."""
    step = step_named(name)
    budget = int(live_bytes(step).during.max()) * percent // 100
    found = explore(step, SearchRequest(budget))
    bench = bench_of(step)
    for kind in policy_types():
        for policy in kind.candidates(step).whole_step if kind.tried_by_default else ():
            one = bench.try_plan(policy)
            if one is not None and one.interval.most_bytes <= budget:
                assert found.best is not None
                assert found.best.step_time_us <= one.step_time_us * SAME_TIME


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_of_plans_about_as_fast_the_shortest_comes_first(name: str) -> None:
    """None that fits within 1 % of the fastest names fewer settings."""
    found = found_for(name, 60, ("checkpoint", "swap"))
    fastest_us = min(one.step_time_us for one in found.fitting)
    about = [one for one in found.fitting if one.step_time_us <= fastest_us * SAME_TIME]
    assert found.best is not None
    assert found.best.settings == min(one.settings for one in about)
    assert shortest(about).settings == found.best.settings


def test_a_shorter_plan_takes_layers_in_a_row() -> None:
    """Of two layers with one between them, all three are proposed; and without the operators that are kept."""
    effects = effects_of("gpt")[1]
    rows = [row for row, one in enumerate(effects.options) if one.group.pattern == "layers.*"]
    row = next(row for row in rows if getattr(effects.options[row].policies[0], "keep", ()))
    columns = effects.columns_of(row)
    chosen = columns[np.isin(np.array(effects.modules)[columns], ("layers.0", "layers.2"))]
    plans = [Plan(effects.policies(one)).describe() for one in shorter(effects, chosen)]
    kept = Plan(effects.policies(chosen)).describe().partition(" (keep")[2]
    assert f"checkpoint layers.0-2 (keep{kept}" in plans
    assert f"checkpoint layers.* (keep{kept}" in plans
    assert "checkpoint layers.{0,2}" in plans


def listed(found: SearchResult) -> str:
    """Returns everything that a search tried or refused, in words."""
    plans = [one.plan.describe() for one in (*found.fitting, *found.others)]
    return "\n".join((*plans, *(what for what, _ in found.refused)))


@pytest.mark.parametrize("name", [*SAMPLES, "card"])
def test_every_policy_is_tried_or_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    """Nothing is left out in silence: also on a card, and where the step has no use for a policy."""
    if name == "card":
        script = str(Path(__file__).parents[2] / "sample_traces" / "gpt" / "train.py")
        small = ("--steps", "4", "--layers", "2", "--length", "64", "--dropout", "0")
        step = record(tmp_path, "--dry-run", "--device", "rtx4090", script, *small).trace.fullest_step()
    else:
        step = step_named(name)
    said = listed(explore(step, SearchRequest(int(live_bytes(step).during.max() * 0.7))))
    for policy in ("precision", "accumulate", "loss", "optimizer", "checkpoint", "swap activations", "compile"):
        assert policy in said
    assert ("optimizer host" in said) == (name == "card")


def test_several_settings_are_mixed() -> None:
    """At a budget between those of two settings for all layers, some layers get one and some the other."""
    found = found_for("gpt", 60, ("checkpoint",))
    assert found.best is not None
    assert len(found.best.policies) > 1
    assert all(isinstance(policy, Checkpoint) for policy in found.best.policies)
    chosen = [name for policy in found.best.policies for name in getattr(policy, "modules", ())]
    assert not any(one in around(two) for one, two in itertools.permutations(chosen, 2))


def test_a_mixture_refused_as_a_whole_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the replay refuses what the sum proposed, the option with the fewest modules is left out."""
    step = step_named("gpt")
    effects = effects_of("gpt")[1].of_kind(Checkpoint)
    budget = int(live_bytes(step).during.max()) * 6 // 10
    refusing = bench_of(step)
    attempt = refusing.try_plan
    refused: list[tuple[Policy, ...]] = []

    def try_plan(*policies: Policy) -> Candidate | None:
        if len(policies) > 1 and not refused:
            refused.append(policies)
            return None
        return attempt(*policies)

    monkeypatch.setattr(refusing, "try_plan", try_plan)
    found = Mixture(refusing, (), effects, budget).search()
    assert refused
    assert found is not None
    assert found.policies != refused[0]
    assert found.interval.most_bytes <= budget


def test_effects_are_measured_once_for_combinations_that_differ_in_the_update() -> None:
    """What is recomputed or moved frees the same under another form of the optimizer's update."""
    step = step_named("gpt")
    bench = bench_of(step)
    budget = int(live_bytes(step).during.max()) * 7 // 10
    selection = Selection(bench, {"checkpoint"}, budget)
    for frame in ((OptimizerPolicy(loop="loop"),), ()):
        before = len(bench.archive)
        selection.choose(frame)
        assert any(set(frame) < set(one.policies) for one in bench.fitting(budget))
    assert len(bench.archive) - before < len(find_options(step, [Checkpoint])) + 10


def test_changes_of_the_best_plan_are_tried_in_the_end() -> None:
    """The result fits, is never slower, and is the same in every search."""
    step = step_named("gpt")
    budget = int(live_bytes(step).during.max()) * 6 // 10
    results = []
    for _ in range(2):
        bench = bench_of(step)
        selection = Selection(bench, {"checkpoint"}, budget)
        selection.choose(())
        before, tried = bench.fitting(budget)[0], len(bench.archive)
        selection.refine()
        after = bench.fitting(budget)[0]
        assert len(bench.archive) > tried
        assert after.step_time_us <= before.step_time_us
        results.append(after)
    assert results[0] == results[1]


def test_combinations_that_cannot_be_faster_are_left_out() -> None:
    """A form of the update that takes as long as another is not searched after it; the plain step always is."""
    step = step_named("gpt")
    bench = bench_of(step)
    budget = int(live_bytes(step).during.max()) * 7 // 10
    selection = Selection(bench, {"checkpoint"}, budget)
    selection.choose(())
    searched = len(bench.archive)
    selection.choose((OptimizerPolicy(loop="loop"),))
    assert not any(OptimizerPolicy(loop="loop") in key and len(key) > 1 for key in bench.archive)
    assert len(bench.archive) == searched


def test_choices_of_layers_come_in_order() -> None:
    """Like choices stand side by side, those that free most first, and each layer keeps all of one layer's choices."""
    _, effects = effects_of("gpt")
    keys = list(zip(effects.option_of.tolist(), effects.modules, strict=True))
    attention = next(row for row, option in enumerate(effects.options) if option.group.pattern == "layers.*.attention")
    whole = next(row for row, option in enumerate(effects.options) if option.group.pattern == "layers.*")
    scattered = [(attention, "layers.0.attention"), (whole, "layers.1"), (attention, "layers.2.attention")]
    ordered = in_order(effects, np.array(sorted(keys.index(key) for key in scattered)))
    assert {keys[column] for column in ordered} == {
        (whole, "layers.0"),
        (attention, "layers.1.attention"),
        (attention, "layers.2.attention"),
    }


def test_policies_with_the_same_settings_become_one() -> None:
    one, two, three = Checkpoint(("a",)), Checkpoint(("b",), keep=("matmul",)), Checkpoint(("c",))
    assert merged([one, two, three]) == (Checkpoint(("a", "c")), two)


def test_modules_that_save_what_others_made_are_groups_too() -> None:
    """A linear layer saves its input, which it does not make: moving is worth trying there, recompute is not."""
    step = step_named("gpt")
    made = {group.pattern for group in find_groups(step)}
    saved = {group.pattern: group.saved_bytes for group in find_groups(step, with_inputs=True)}
    assert "layers.*.mlp.2" in saved.keys() - made
    own = Swap(("layers.*.mlp.2",), to="disk").transform(step)
    assert live_bytes(own).during.max() < live_bytes(step).during.max()
    only = {option.group.pattern for option in find_options(step, [Checkpoint])}
    assert "layers.*.mlp.2" not in only


def test_no_more_state_is_moved_than_is_needed() -> None:
    """Of the optimizer's state, the fastest plan moves a part, which costs less than all of it."""
    step = step_named("gpt")
    bench = bench_of(step)
    budget = int(live_bytes(step).during.max()) * 3 // 10
    selection = Selection(bench, {"swap"}, budget)
    whole = Swap(what="optimizer", to="disk")
    selection.choose((whole,))
    before = bench.fitting(budget)[0]
    selection.narrow()
    after = bench.fitting(budget)[0]
    (part,) = (one for one in after.policies if isinstance(one, Swap) and one.what == "optimizer")
    assert whole in before.policies
    assert not part.is_whole
    assert after.step_time_us < before.step_time_us
    assert part in whole.narrower(step)
    sizes = [int(live_bytes(each.transform(step)).during.max()) for each in whole.narrower(step)]
    assert sizes == sorted(sizes, reverse=True)


def lone_options(step: Step) -> list[Option]:
    """The settings of a checkpoint of one module."""
    of_layers = (one for one in find_options(step, [Checkpoint]) if one.group.pattern == "layers.*")
    return [dataclasses.replace(one, members=one.members[:1], sizes=one.sizes[:1]) for one in of_layers]


def test_a_lone_module_is_measured_with_more_than_one_setting() -> None:
    """One that exceeds the budget by itself may fit together with what changes the optimizer's update."""
    step = step_named("gpt")
    effects = measure_effects(bench_of(step), (), lone_options(step), int(live_bytes(step).during.max()) // 2)
    assert effects is not None
    assert len(effects.options) > 1


def test_what_is_needed_beyond_live_bytes_is_over_the_budget() -> None:
    """More than one setting is measured where live bytes fit, and not what the allocator reserves or may be live."""
    step = step_named("gpt")
    peak = int(live_bytes(step).during.max())
    bench = Workbench(step, time.monotonic() + 300, needed=lambda one: one.peak_bytes * 5 // 4)
    effects = measure_effects(bench, (), lone_options(step), peak * 11 // 10)
    assert effects is not None
    assert len(effects.options) > 1


def test_reserved_bytes_are_modelled_for_plans_that_matter() -> None:
    """Modelling takes longer than a replay: not for plans that only measure an option, and once for the others."""
    step = step_named("gpt")
    peak = int(live_bytes(step).during.max())
    modelled: list[Plan] = []
    too_much: list[Plan] = []

    def reserved(plan: Plan, _: Step) -> int:
        modelled.append(plan)
        return peak + (plan in too_much)

    needed = SearchRequest(peak).needed
    bench = Workbench(step, time.monotonic() + 300, needed=needed, reserved=reserved, counted_bytes=peak)
    effects = measure_effects(bench, (), find_options(step, [Checkpoint]), peak)
    assert effects is not None
    assert modelled == [Plan()]
    measured = sorted((one for one in bench.archive.values() if one.policies and bench.may_fit(one, peak)), key=rank)
    too_much.append(measured[0].plan)
    assert not bench.fits(measured[0], peak)
    assert bench.fits(measured[1], peak)
    assert [one.policies for one in bench.fitting(peak)[:2]] == [(), measured[1].policies]
    assert len(modelled) == len(set(modelled)) < len(bench.archive)


def test_fewer_copies_at_a_time_make_what_is_moved_fit() -> None:
    """Options move with as many copies as hide them best; where nothing else fits, with fewer."""
    recorded = step_named("gpt")
    device = np.full(len(recorded.storages), "cuda:0", dtype=np.object_)
    storages = recorded.storages.replace(device=device)
    bench = bench_of(dataclasses.replace(recorded, storages=storages, memory=Memory.empty()))
    effects = measure_effects(bench, (), find_options(bench.step, [Swap]))
    few, many = (bench.try_plan(Swap(("layers.*",), prefetch=number)) for number in (1, 4))
    assert effects is not None
    assert few is not None
    assert many is not None
    assert bench.needed(few) < bench.needed(many)
    found = Mixture(bench, (), effects, bench.needed(few)).search()
    assert found is not None
    assert found.policies == few.policies


def test_what_runs_again_can_have_its_inputs_moved() -> None:
    """Such an option is in the search: a policy of each kind for the same modules."""
    options = find_options(step_named("gpt"), [Checkpoint, Swap])
    both = [option for option in options if len(option.makers) == 2]
    assert {type(policy) for option in both for policy in option.policies} == {Checkpoint, Swap}
    assert all(one.modules == other.modules for one, other in (option.policies for option in both))
