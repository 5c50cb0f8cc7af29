"""The bounds of a predicted peak, the upper of which must fit the budget, and of a plan's step time."""

from __future__ import annotations

import dataclasses
import gc
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import memprof
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest
from memprof.planners.search.workbench import Workbench
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.interval import Interval, interval_of, time_interval_of
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.registry import policy_types
from memprof.policies.remat.policy import Remat
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.recorder.machine import short_types
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace
from memprof.units import format_bytes_between
from tests.building import Op, Storage, make_step
from tests.policies.faces import record_step, recorded

BF16, PURE = Precision("bf16"), Precision("bf16", "bf16")


def interval(step, *policies):
    """Returns the bounds of a plan."""
    found = Plan(policies).predict(step)[0].prediction.interval
    assert found is not None
    return found


def test_what_is_replayed_is_known_to_the_byte():
    step = recorded("gpt")
    peak = int(live_bytes(Checkpoint(("layers.*",)).transform(step)).during.max())
    assert interval(step, Checkpoint(("layers.*",))) == Interval(peak, peak)
    assert interval(step).is_exact


@pytest.mark.parametrize(
    "kind", [kind for kind in policy_types() if kind.source == "modelled"], ids=lambda kind: kind.name
)
def test_what_is_modelled_has_been_off(kind):
    """Every policy that does not replay alone says by how much it was off."""
    below, above = kind.errors_seen
    assert 0 < below < 0.2
    assert 0 < above < 0.2


@pytest.mark.parametrize("job", ["gpt", "resnet", "lstm", "vit", "unet"])
def test_measured_peaks_lie_between(job):
    """The bounds hold on the samples, and errors of several policies add up."""
    step = recorded(job)
    if job == "lstm" and "bfloat16" not in short_types():
        pytest.skip("this processor has no kernels for recurrent layers in bf16")
    bounds = interval(step, BF16)
    measured = int(live_bytes(record_step(job, Plan((BF16,)))).during.max())
    assert bounds.least_bytes <= measured <= bounds.most_bytes
    swapped = interval(step, Swap(what="optimizer", to="disk"), BF16)
    peak = int(live_bytes(Plan((Swap(what="optimizer", to="disk"), BF16)).transform(step)).during.max())
    assert swapped.most_bytes - peak >= bounds.most_bytes - int(live_bytes(BF16.transform(step)).during.max())


def step_beside_a_graph(path, *policies):
    """Records a step during which a variable keeps the graph of an evaluation that ran before, with gradients on."""
    gc.collect()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*layers)
    inputs, optimizer = torch.randn(128, 64), torch.optim.SGD(model.parameters(), 0.1)
    for policy in policies:
        policy.apply(Job(model, [optimizer]))
    held = None
    with memprof.record(path, skip=1, steps=1, force=True):
        for _ in range(2):
            held = held if held is not None else model(inputs)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return Trace.open(path).fullest_step()


def test_what_an_earlier_forward_left_may_be_less_under_a_plan(tmp_path):
    """The recording does not show what that forward saved: the lower bound is without it, the upper one with it."""
    step = step_beside_a_graph(tmp_path / "base.memprof")
    swap = Swap((".",), to="disk")
    measured = int(live_bytes(step_beside_a_graph(tmp_path / "swap.memprof", swap)).during.max())
    predicted = int(live_bytes(swap.transform(step)).during.max())
    assert measured < 0.85 * predicted
    bounds = interval(step, swap)
    assert bounds.least_bytes <= measured <= predicted <= bounds.most_bytes
    idle = 4 * 128 * 256 * 4  # what tanh saved
    assert bounds.most_bytes - bounds.least_bytes > idle
    assert interval(step, OptimizerPolicy(loop="loop")).least_bytes > predicted - idle  # it changes no forward
    shown = interval_of((BF16,), (step,), (step,), dry_steps={(BF16,): (step,)})  # a dry run of the plan shows it
    assert shown.is_exact


def test_remat_holds_the_job_whatever_is_not_known():
    """But for what kernels take meanwhile, which is known when it is taken."""
    step = recorded("gpt")
    budget = int(0.8 * live_bytes(step).during.max())
    predicted = int(live_bytes(Plan((Remat(budget=str(budget)), BF16)).transform(step)).during.max())
    assert interval(step, Remat(budget=str(budget)), BF16).most_bytes <= max(1.02 * budget, predicted)


def test_a_plan_fits_with_its_upper_end():
    """Unless plans are checked: then the predicted peak has to fit."""
    step = recorded("gpt")
    bench = Workbench(step, deadline=math.inf)
    one = bench.try_plan(BF16)
    assert one is not None
    assert one.peak_bytes < one.interval.most_bytes
    assert bench.fitting(one.peak_bytes) == []
    assert bench.fitting(one.interval.most_bytes) == [one]
    checked = Workbench(step, deadline=math.inf, needed=SearchRequest(0, is_checked=True).needed)
    assert checked.try_plan(BF16) in checked.fitting(one.peak_bytes)
    search_request = SearchRequest(one.peak_bytes, allow=("precision",), time_limit_s=20)
    assert explore(step, search_request).best is None
    assert explore(step, dataclasses.replace(search_request, is_checked=True)).best == one


def test_a_plan_file_holds_its_bounds(tmp_path):
    """Written by predict, read back by verify; plans of older versions have none."""
    from memprof.policies.plan.plan_file import read_plan, write_plan

    plan, _ = Plan((BF16,)).predict(recorded("gpt"))
    write_plan(tmp_path / "plan.toml", plan)
    assert read_plan(tmp_path / "plan.toml").prediction.interval == plan.prediction.interval
    text = (tmp_path / "plan.toml").read_text()
    older = "\n".join(line for line in text.splitlines() if "t_peak_bytes" not in line or "recorded" in line)
    (tmp_path / "older.toml").write_text(older)
    assert read_plan(tmp_path / "older.toml").prediction.interval is None


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [(1 << 20, 1 << 20, "1.00 MiB"), (1 << 20, 3 << 19, "1.00 to 1.50 MiB"), (1000, 3 << 19, "1000 B to 1.50 MiB")],
)
def test_bounds_in_words(least, most, text):
    assert format_bytes_between(least, most) == text


def test_suggest_says_bounds_and_proposes_the_check(tmp_path):
    """From the command line: what is not known to the byte is shown as such, and checked first."""
    command = [sys.executable, "-m", "memprof", "suggest", "sample_traces/gpt/run.memprof", "--budget", "80%"]
    done = subprocess.run([*command, "--allow", "precision"], capture_output=True, text=True, check=True)
    assert ", not checked, step time" in done.stdout.splitlines()[0]
    following = [line for line in done.stdout.splitlines() if line.startswith("next: ")]
    assert "--check" in following[0]
    exact = subprocess.run([*command, "--allow", "checkpoint"], capture_output=True, text=True, check=True)
    assert "not checked" not in exact.stdout
    assert "--write" in next(line for line in exact.stdout.splitlines() if line.startswith("next: "))


def test_errors_of_two_policies_add_up_as_independent_ones() -> None:
    """Each alone by its own errors; together by the root of the sum of their squares."""
    step = make_step([Op(makes=["a"])], [Storage("a", 64)])
    checkpoint, precision = Checkpoint.from_flag("*"), Precision.from_flag("bf16")
    assert checkpoint.time_errors_seen is not None
    assert precision.time_errors_seen is not None
    (a, b), (c, d) = checkpoint.time_errors_seen, precision.time_errors_seen
    alone = time_interval_of([checkpoint], step, 1000.0)
    both = time_interval_of([checkpoint, precision], step, 1000.0)
    assert alone is not None
    assert both is not None
    assert alone.bounds == pytest.approx([1000 * (1 - a), 1000 * (1 + b)])
    assert both.bounds == pytest.approx([1000 * (1 - math.hypot(a, c)), 1000 * (1 + math.hypot(b, d))])


def test_unmeasured_errors_give_no_bounds() -> None:
    """Neither without a policy, nor under one whose times were compared with no run."""
    step = make_step([Op(makes=["a"])], [Storage("a", 64)])
    assert time_interval_of([], step, 1000.0) is None
    assert time_interval_of([Checkpoint.from_flag("*"), Remat.from_flag("8GiB")], step, 1000.0) is None
    assert time_interval_of([Checkpoint.from_flag("*")], step, math.nan) is None
