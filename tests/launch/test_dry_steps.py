"""Steps under a precision come from a dry run where the job may be run, and plans are predicted from them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.plans.basis import Basis, basis_of
from memprof.analysis.plans.frames import steps_of_frame
from memprof.launch.dry.dry_job import find_recorded_job
from memprof.launch.dry.job_server import dry_run
from memprof.launch.fit.request import measure
from memprof.launch.parent.settings import DryWindow
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.precision.policy import Precision
from memprof.trace.store import Trace
from tests.scripts import net_of_blocks

#: What a float32 recording cannot show: ``float()`` copies nothing there, and all of it under autocast.
BLOCKS = (
    net_of_blocks(4, result="x + torch.tanh(self.narrow(torch.relu(self.wide(x))).float())")
    + """
SHAPE = (1024, 64)
"""
)
IMAGES = (
    net_of_blocks(
        3,
        members="self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)",
        result="x + torch.relu(self.norm(self.conv(x)).float())",
    )
    + """
SHAPE = (16, 8, 16, 16)
"""
)
LOOP = """
torch.set_num_threads(1)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(6):
    loss = model(torch.randn(SHAPE)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
JOBS = {"blocks": BLOCKS, "images": IMAGES}
BF16 = Precision(dtype="bf16")


@pytest.fixture(scope="module", params=["blocks", pytest.param("images", marks=pytest.mark.slow)])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job and its recording."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "train.py").write_text(JOBS[request.param] + LOOP)
    record(folder, "run.memprof")
    return folder


@pytest.fixture(autouse=True)
def here(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def record(folder: Path, name: str, *options: str) -> Trace:
    words = ["-m", "memprof", "record", "-q", "-f", "--stop", "-o", name, *options, "train.py"]
    subprocess.run([sys.executable, *words], cwd=folder, check=True, capture_output=True, timeout=240)
    return Trace.open(folder / name)


def with_dry_steps(basis: Basis, tmp_path: Path) -> Basis:
    """Returns the steps to plan for, with those of a dry run in bfloat16."""
    target = find_recorded_job(Trace.open("run.memprof").manifest)
    outcome = dry_run(target, Plan((BF16,)), DryWindow(), keep=tmp_path / "dry.memprof")
    assert outcome.reason == ""
    steps = steps_of_frame((BF16,), basis, Trace.open(tmp_path / "dry.memprof"), Trace.open("run.memprof").manifest)
    assert steps is not None
    return dataclasses.replace(basis, dry_steps={(BF16,): steps})


def measured_under(folder: Path, policies: Sequence[Policy]) -> int:
    write_plan(folder / "plan.toml", Plan(tuple(policies)))
    return measure(record(folder, "planned.memprof", "--plan", "plan.toml")).peak_bytes


def test_plans_on_top_of_a_dry_run_are_exact(job: Path, tmp_path: Path) -> None:
    """Measured peaks are the predicted ones to the byte, alone and with other policies."""
    basis = with_dry_steps(basis_of(Trace.open("run.memprof")), tmp_path)
    plans: list[tuple[Policy, ...]] = [
        (BF16,),
        (BF16, Checkpoint(modules=("layers.*",))),
        (BF16, OptimizerPolicy.from_flag("in-backward")),
    ]
    for policies in plans:
        plan, _ = basis.predict(Plan(policies))
        assert plan.prediction is not None
        assert plan.prediction.peak_allocated_bytes == measured_under(job, policies), plan.describe()
    alone, _ = basis.predict(Plan((BF16,)))
    assert alone.prediction is not None
    assert alone.prediction.interval is not None
    assert alone.prediction.interval.is_exact


def test_operators_have_the_times_of_those_they_stand_for(tmp_path: Path) -> None:
    """A dry run computes nothing: its operators take the recorded times, scaled, so that recompute has a cost."""
    recorded = basis_of(Trace.open("run.memprof"))
    basis = with_dry_steps(recorded, tmp_path)
    (step, *_) = basis.dry_steps[(BF16,)]
    rates = recorded.step.product_flops_per_us
    ratio = rates[0] / rates[1] if all(rates) else 1.0
    products, before = step.ops.flops > 0, recorded.step.ops.flops > 0
    assert products.sum() == before.sum()
    scaled = recorded.step.ops.duration_us[before] * ratio
    assert step.ops.duration_us[products] == pytest.approx(scaled, rel=0.01)
    slower, _ = basis.predict(Plan((BF16, Checkpoint(modules=("layers.*",)))))
    assert slower.prediction is not None
    assert slower.prediction.step_time_us > step.duration_us


def test_a_dry_run_on_other_inputs_replaces_nothing(job: Path, tmp_path: Path) -> None:
    """It is another step."""
    basis = basis_of(Trace.open("run.memprof"))
    (tmp_path / "train.py").write_text((job / "train.py").read_text().replace("SHAPE = (", "SHAPE = (2 * "))
    other = record(tmp_path, "dry.memprof", "--dry-run", "--precision", "bf16")
    assert steps_of_frame((BF16,), basis, other, Trace.open("run.memprof").manifest) is None


def test_suggest_with_check_searches_again_from_it(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The budget is just what the plan takes: the model says otherwise, and the plan is found, predicted and kept."""
    from memprof.cli.main import main

    wanted = measured_under(job, (BF16,))
    words = ["suggest", "run.memprof", "--budget", f"{wanted}B", "--allow", "precision", "--check", "--json"]
    assert main(words) == 0
    told: dict[str, Any] = json.loads(capfd.readouterr().out)
    (one,) = told["checked"]
    assert one["dry_run_peak_allocated_bytes"] == one["predicted_peak_allocated_bytes"] == wanted
    assert one["fits"]


def test_fit_searches_again_from_it(capfd: pytest.CaptureFixture[str]) -> None:
    """The plan's predicted, dry-run and measured peaks are equal."""
    words = [sys.executable, "-m", "memprof", "fit", "--budget", "80%", "--allow", "precision", "--json", "-f"]
    done = subprocess.run([*words, "-o", "out", "train.py"], check=True, capture_output=True, text=True, timeout=240)
    (attempt,) = json.loads(done.stdout)["attempts"]
    assert attempt["outcome"] == "fits"
    assert attempt["dry_run"]["difference_bytes"] == 0
    assert attempt["measured"]["peak_allocated_bytes"] == attempt["dry_run"]["peak_allocated_bytes"]
    assert "dry-running the job with precision bf16, to plan from its steps" in done.stderr
