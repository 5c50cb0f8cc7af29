from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.errors import PolicyError
from memprof.planners.find import find_plan
from memprof.planners.graph.graph import graph_of
from memprof.planners.graph.project import remat_of
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compress.policy import Compress
from memprof.policies.evict import outline
from memprof.policies.evict.planned import keys_of
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan, parse_plan
from memprof.policies.precision.policy import Precision
from memprof.policies.remat import sequence
from memprof.policies.remat.cells import Need
from memprof.policies.remat.counters import ProcessorCounter
from memprof.policies.remat.needs import Operator
from memprof.policies.remat.policy import Remat
from memprof.policies.swap.policy import Swap
from memprof.recorder.profiler.native import AllocatorTable
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.policies.faces import peaks, record_step

ROOT = Path(__file__).resolve().parents[3]
find_kind = sequence.Sequence.kind


@pytest.fixture(autouse=True, scope="module")
def table() -> Iterator[None]:
    """The allocator counts all the while, as in a job that is started under a plan."""
    gc.collect()
    table = AllocatorTable()
    table.switch_on(is_late=True)
    yield
    table.switch_off()


@cache
def baseline(name: str) -> Step:
    return record_step(name)


def other_bytes() -> int:
    """What this process holds besides the job: remat counts it, and a recording does not."""
    gc.collect()
    counter = ProcessorCounter()
    used = counter.used_bytes()
    counter.close()
    return used


class TimedNeed(Need):
    """A need of an operator that takes a set time."""

    __slots__ = ("set_us",)
    least_us = property(lambda self: self.set_us, lambda self, _: None)  # what was measured is not taken


def timed_kind(self: sequence.Sequence, operator: Operator, *args: Any, **kwargs: Any) -> sequence.Kind:
    kind = find_kind(self, operator, *args, **kwargs)
    if not isinstance(kind.need, TimedNeed):
        kind.need = TimedNeed()
        kind.need.set_us = set_time_us(operator.name)
    return kind


def set_time_us(operator: str) -> float:
    """A time of an operator's own, between 5 and 105 us; the runtime does not time views."""
    if operator.split(".")[1] in (
        "view",
        "t",
        "transpose",
        "detach",
        "expand",
        "unsqueeze",
        "select",
        "split",
        "permute",
    ):
        return 0.0
    return 5.0 + zlib.crc32(operator.encode()) % 9973 / 100


# -- the two faces ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "share"), [("gpt", 0.7), ("resnet", 0.6), ("lstm", 0.7), ("unet", 0.8)])
def test_the_predicted_peak_is_the_measured_one(name, share):
    """Both are within the budget, and the prediction is within 6 % of a run whose kernels cannot be listened to."""
    step = baseline(name)
    budget = int(peaks(step)[0] * share)
    predicted = Remat(budget=str(budget)).transform(step)
    measured = record_step(name, Plan((Remat(budget=str(budget + other_bytes())),)))
    assert max(peaks(predicted)[0], peaks(measured)[0]) <= budget
    assert peaks(predicted)[0] == pytest.approx(peaks(measured)[0], rel=0.06)
    for each in (predicted, measured):
        again = each.ops.take(each.ops.is_recompute)
        assert len(again) > 0
        assert set(again.phase) == {"backward"}


@pytest.mark.parametrize(("name", "share"), [("gpt", 0.5), ("unet", 0.6)])
def test_recomputation_is_predicted_within_a_point_where_times_are_the_same(monkeypatch, name, share):
    """Both plan by one code: given the time of each operator, shares of recomputation differ by 1 point at most."""
    step = baseline(name)
    monkeypatch.setattr(outline, "op_cost_us", lambda step: np.array([set_time_us(name) for name in step.ops.name]))
    monkeypatch.setattr(sequence.Sequence, "kind", timed_kind)
    budget = int(peaks(step)[0] * share)
    predicted = Remat(budget=str(budget)).transform(step)
    measured = record_step(name, Plan((Remat(budget=str(budget + other_bytes()), warn_factor=1e9),)))
    again = [Counter(each.ops.name[each.ops.is_recompute].tolist()) for each in (predicted, measured)]
    assert again[0].total() > 25
    took_us = [sum(set_time_us(name) * count for name, count in counts.items()) for counts in again]
    assert abs(took_us[0] - took_us[1]) <= 0.01 * sum(set_time_us(name) for name in step.ops.name)


def test_what_runs_again_is_recorded_where_it_ran_first():
    """The recording gives a second run the module and the line of the first, not of the node that asked."""
    budget = int(peaks(baseline("gpt"))[0] * 0.6)
    step = record_step("gpt", Plan((Remat(budget=str(budget + other_bytes())),)))
    names = np.append(step.modules.name, "").astype(object)
    again = step.ops.take(step.ops.is_recompute)
    placed = {(name, str(names[module])) for name, module in zip(again.name, again.module_id, strict=True)}
    first = step.ops.take((step.ops.phase == "forward") & ~step.ops.is_recompute)
    ran = {(name, str(names[module])) for name, module in zip(first.name, first.module_id, strict=True)}
    assert placed <= ran
    assert any(module.startswith("layers.") for _, module in placed)


def test_the_step_is_left_and_the_new_one_holds():
    """The recorded step stays as it is; the predicted one keeps every promise of a step, and takes longer."""
    step = baseline("resnet")
    freed = step.storages.freed_op_id.copy()
    changed = Remat(budget=str(int(peaks(step)[0] * 0.5))).transform(step)
    changed.check()
    np.testing.assert_array_equal(step.storages.freed_op_id, freed)
    assert changed.duration_us > step.duration_us
    assert live_bytes(changed).during.max() < live_bytes(step).during.max()


def test_a_budget_too_small_is_refused_before_any_run():
    """The prediction names the operator that does not fit, and what it needs."""
    with pytest.raises(PolicyError, match=r"remat cannot stay within .*: \S+ in \w+ needs .* MiB"):
        Remat(budget=str(int(peaks(baseline("gpt"))[0] * 0.2))).transform(baseline("gpt"))


def test_it_stands_in_plans_with_others():
    """What checkpoint, precision and accumulate leave is held within a budget; swap and compress are refused."""
    step = baseline("gpt")
    others = (Checkpoint(modules=("layers.[0-1]",)), Precision(dtype="bf16"), Accumulate(micro_batches=2))
    for policy in others:
        alone = policy.transform(step)
        budget = int(peaks(alone)[0] * 0.9)
        within = Plan((policy, Remat(budget=str(budget)))).transform(step)
        within.check()
        assert peaks(within)[0] <= budget
    for policy in (Swap(to="disk"), Compress()):
        with pytest.raises(PolicyError, match="two policies"):
            Plan((policy, Remat(budget="1GiB"))).transform(step)


# -- what a planner names --------------------------------------------------------------------------------------------


def test_a_planners_schedule_becomes_a_plan_and_is_executed():
    """What dtr's schedule makes again is named in a plan file, dropped in the job, and runs again as predicted."""
    step = baseline("resnet")
    graph = graph_of(step)
    found = find_plan(step, int(peaks(step)[0] * 0.6), planner="dtr", time_limit_s=20)
    assert found.runs is not None
    policy = remat_of(step, graph, found.runs)
    assert policy is not None
    assert parse_plan(format_plan(Plan((policy,)))).policies == (policy,)
    predicted = policy.transform(step)
    measured = record_step("resnet", Plan((policy,)))
    assert peaks(measured)[0] == pytest.approx(peaks(predicted)[0], rel=0.03)
    assert peaks(measured)[0] < peaks(step)[0]
    counts = [int(each.ops.is_recompute.sum()) for each in (predicted, measured)]
    assert counts[1] == pytest.approx(counts[0], rel=0.1)


def test_keys_name_each_run_once():
    """No two operators of a step have the same key, and backward has none."""
    step = baseline("lstm")
    keys = keys_of(step)
    given = [key for key in keys if key]
    assert len(set(given)) == len(given)
    assert not any(key for key, phase in zip(keys, step.ops.phase, strict=True) if phase != "forward")


# -- from the command line -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The job of gpt.py at 60 % of its peak."""
    folder = tmp_path_factory.mktemp("remat")
    return folder / "run.memprof", memprof(folder, "record", "-o", "run.memprof", "--remat", "20MiB", job("gpt"))


def job(name: str) -> str:
    return str(ROOT / "tests" / "policies" / "jobs" / f"{name}.py")


def memprof(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memprof.cli.main", *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120)


def test_a_script_trains_within_a_budget_with_its_own_losses(recorded, tmp_path):
    """Every line of the job is that of the plain run; no recorded step is above the budget, or hides what ran again."""
    path, done = recorded
    assert done.returncode == 0, done.stderr
    plain = subprocess.run(
        [sys.executable, job("gpt")], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("step")] == plain.stdout.splitlines()
    step = Trace.open(path).steady_step()
    assert peaks(step)[0] <= 20 * 2**20
    again = step.ops.take(step.ops.is_recompute)
    assert len(again) > 0
    assert (again.module_id != NONE).any()
    report = json.loads(memprof(tmp_path, "report", str(path), "--json").stdout)
    assert report["recomputed_us"] > 0


def test_a_script_that_cannot_fit_ends_with_a_sentence(tmp_path):
    """Exit status 125, the sentence, no traceback, and nothing of the runtime's own."""
    done = memprof(tmp_path, "record", "-o", "run.memprof", "--remat", "8MiB", job("gpt"))
    assert done.returncode == 125
    assert "memprof: remat cannot stay within 8.00 MiB: aten." in done.stderr
    assert "Traceback" not in done.stderr
