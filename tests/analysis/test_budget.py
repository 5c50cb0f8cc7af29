"""Runs compared with their budgets, and the commands that find another plan."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.analysis.diff.budget import BudgetVerdict, highest_peak, judge_budget
from memprof.analysis.plans.another_plan import PlannedJob, commands_after_failure, commands_over_budget
from memprof.analysis.plans.predict import forecast
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.shard.policy import Shard
from memprof.replay.live import live_bytes
from memprof.trace.files.container import TABLES
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, Steps, Storages
from memprof.trace.store import Trace, write_trace

SAMPLE = Path(__file__).parent.parent.parent / "sample_traces" / "gpt" / "run.memprof"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLE, "run.memprof")
    return tmp_path


def side(trace: Trace, more_bytes: int = 0, **changes: Any) -> tuple[Manifest, dict[Any, Any]]:
    """Returns a rank of the sample whose storages hold more, and whose manifest is changed."""
    tables: dict[Any, Any] = {kind: trace.table(kind) for kind in TABLES}
    storages = tables[Storages]
    larger = storages.allocated_bytes.copy()
    row = int(np.flatnonzero((storages.category == "parameter") & (storages.freed_op_id == NONE))[0])
    larger[row] += more_bytes
    tables[Storages] = storages.replace(allocated_bytes=larger)
    return dataclasses.replace(trace.manifest, **changes), tables


def only(trace: Trace, kind: str, *, is_complete: bool) -> Trace:
    """Returns the sample as though its steps had been of one kind, and seen to their end or not."""
    manifest, tables = side(trace)
    steps = tables[Steps]
    kinds = np.where(steps.kind == "plain", steps.kind, kind)
    changed = steps.replace(kind=kinds, is_complete=np.full(len(steps), is_complete))
    return Trace.of([(manifest, {**tables, Steps: changed})], "cut.memprof")


def peaks(trace: Trace) -> dict[int, int]:
    return {number: int(live_bytes(trace.step(number)).during.max()) for number in trace.recorded_steps}


def test_the_fullest_of_all_recorded_steps_counts() -> None:
    """Uses the step and rank with the highest peak; the message names both if it is over budget."""
    trace = Trace.open("run.memprof")
    most = max(peaks(trace).values())
    fullest = highest_peak(trace)
    assert fullest is not None
    assert fullest[0] == most == peaks(trace)[fullest[1]]
    assert judge_budget(trace, most).fits is True
    over = judge_budget(trace, most - 1)
    assert (over.fits, over.excess_bytes, over.exit_code) == (False, 1, 4)
    assert over.describe().startswith("OVER the budget by 1 B: 88.92 of 88.92 MiB in step ")
    ranks = Trace.of([side(trace, rank=0, world_size=2), side(trace, MIB, rank=1, world_size=2)], "two.memprof")
    found = judge_budget(ranks, most)
    assert (found.measured_bytes, found.rank) == (most + MIB, 1)
    assert found.describe() == f"OVER the budget by 1.00 MiB: 89.92 of 88.92 MiB in step {found.step} of rank 1."


def test_steps_that_were_cut_short_prove_nothing_but_an_excess() -> None:
    """A warm-up step within the budget leaves it open, with its own exit code; one above it is above it."""
    trace = Trace.open("run.memprof")
    for cut in (only(trace, "warm_up", is_complete=True), only(trace, "recorded", is_complete=False)):
        found = judge_budget(cut, 1 << 40)
        assert (found.fits, found.exit_code) == (None, 3)
        cannot = "cannot determine whether it is within the budget: "
        assert found.describe().startswith(cannot + "at least 88.92 MiB of 1.00 TiB;")
        assert "no complete step after the warm-up was recorded" in found.describe()
        assert judge_budget(cut, 4096).describe().startswith("OVER the budget by 88.91 MiB: at least 88.92 MiB of 4.00")


def test_the_words_say_how_a_peak_is_known() -> None:
    """Measured, dry-run and predicted peaks are distinguished."""
    assert BudgetVerdict(4096, 2048).describe() == "within the budget, measured: 2.00 of 4.00 KiB."
    assert BudgetVerdict(4096, 2048, "in a dry run").describe() == "within the budget, in a dry run: 2.00 of 4.00 KiB."
    assert BudgetVerdict(1024, 4096, "predicted").describe() == (
        "OVER the budget by 3.00 KiB, predicted: 4.00 of 1.00 KiB."
    )
    assert BudgetVerdict(4096, None, unknown="nothing is there").describe() == (
        "cannot determine whether it is within the budget of 4.00 KiB: nothing is there."
    )


def planned(*policies: Any, budget_bytes: int | None) -> PlannedJob:
    """Returns the sample's job under a plan with its prediction."""
    plan = forecast(Trace.open("run.memprof"), Plan(tuple(policies))).plan
    return PlannedJob(dataclasses.replace(plan, budget_bytes=budget_bytes), Path("plan.toml"), "train.py --lr 1")


def test_a_run_above_its_prediction_searches_with_the_error_off_the_budget() -> None:
    """On the recording that the plan was made from, to a new file; the run is compared with the whole budget."""
    job = planned(Checkpoint(modules=("layers.*",)), budget_bytes=80 * MIB)
    assert job.plan.prediction is not None
    Path("plan.toml").touch()
    predicted = job.plan.prediction.peak_allocated_bytes
    assert predicted < 80 * MIB
    first, second = (command for command, _ in commands_over_budget(job, predicted + 10 * MIB))
    assert first == "memprof suggest run.memprof --budget 70.00MiB --write plan-2.toml"
    assert second == "memprof record --plan plan-2.toml --budget 80.00MiB train.py --lr 1"


def test_a_plan_predicted_to_be_over_is_searched_for_anew() -> None:
    """There is no error to take off; ranks that the plan shards over are asked for again."""
    job = planned(Shard.from_flag("fsdp:2"), budget_bytes=MIB)
    (first, _), (second, _) = commands_over_budget(job, 80 * MIB)
    assert first == "memprof suggest run.memprof --budget 1.00MiB --world-size 2 --write plan.toml"
    assert second == "memprof record --plan plan.toml train.py --lr 1"


def test_without_its_recording_fit_makes_one() -> None:
    """Where the recording is gone, holds another step, or never was."""
    job = planned(Checkpoint(modules=("layers.*",)), budget_bytes=MIB)
    fit = "memprof fit --budget 1.00MiB train.py --lr 1"
    write_trace(Path("run.memprof"), [side(Trace.open(SAMPLE), MIB)])
    assert [command for command, _ in commands_over_budget(job, 80 * MIB)] == [fit]
    Path("run.memprof").unlink()
    assert [command for command, _ in commands_over_budget(job, 80 * MIB)] == [fit]
    bare = dataclasses.replace(job, plan=Plan(job.plan.policies, budget_bytes=MIB))
    assert [command for command, _ in commands_over_budget(bare, 80 * MIB)] == [fit]
    # In the user's own code, there is no command to run the job by.
    assert commands_over_budget(dataclasses.replace(bare, words=""), 80 * MIB) == []


def test_the_recording_is_found_beside_the_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan names it as it was named then."""
    job = dataclasses.replace(planned(Checkpoint(modules=("layers.*",)), budget_bytes=MIB), path=folder / "plan.toml")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert commands_over_budget(job, 80 * MIB)[0][0].startswith(f"memprof suggest {folder / 'run.memprof'} --budget")


def test_after_a_failure() -> None:
    """Without the policy at fault at the same budget; with less memory where it ran out; else, without the plan."""
    job = planned(Checkpoint(modules=("layers.*",)), budget_bytes=100 * MIB)
    assert job.plan.prediction is not None
    predicted = job.plan.prediction.peak_allocated_bytes
    at_fault = commands_after_failure(job, ran_out=True, forbid="checkpoint")
    assert at_fault[0][0] == "memprof suggest run.memprof --budget 100.00MiB --forbid checkpoint --write plan.toml"
    assert at_fault[1][0] == "memprof record --plan plan.toml train.py --lr 1"
    ran_out = commands_after_failure(job, ran_out=True)[0][0]
    less = float(ran_out.partition("--budget ")[2].partition("MiB")[0])
    assert 0.89 * predicted < less * MIB <= 0.9 * predicted
    room = commands_after_failure(job, ran_out=True, room_bytes=20 * MIB)[0][0]
    assert "--budget 20.00MiB" in room
    assert commands_after_failure(job, ran_out=False) == [
        ("memprof record --stop -o without-plan.memprof train.py --lr 1", "whether the job fails without the plan, too")
    ]
    nothing = PlannedJob(Plan(job.plan.policies), None, "train.py")
    assert commands_after_failure(nothing, ran_out=True)[0][0] == "memprof fit --budget 80% train.py"
