"""What if dry-runs the job under policies that change kernels, in the folder where this user recorded it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("dash")

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.predict import forecast
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.trace.store import Trace
from memprof_dashboard.rank import Rank
from memprof_dashboard.whatif.draft import draft_of
from memprof_dashboard.whatif.dry_frames import DryFrames
from memprof_dashboard.whatif.planning import SearchForm, basis_for, find_plans

JOB = """
import torch
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    loss = model(torch.randn(2048, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A recording that this user made in the current folder."""
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(JOB)
    run("record", "-q", "-o", "run.memprof", "train.py")
    return Rank(Trace.open("run.memprof"))


def run(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "memprof", *words], check=True, capture_output=True, timeout=240)


def peak_of(rank: Rank, plan: Plan, basis: Basis | None = None) -> int:
    return forecast(rank.trace, plan, basis).predicted.peak.allocated_bytes


def test_estimates_give_way_to_dry_runs(rank: Rank) -> None:
    """The first answer is an estimate; the next peaks where a run under the plan does, with other policies on top."""
    dry_frames, plan = DryFrames(may_run=True), Plan((Precision(),))
    first = draft_of(rank, "precision bf16", dry_frames)
    assert first is not None
    assert any("precision bf16 is estimated: a dry run of the job is under way" in text for text in first.warnings)
    assert dry_frames.is_running
    basis, why = dry_frames.basis(rank, basis_for(rank), plan, waits=True)
    assert why == ""
    assert (dry_frames.finished, dry_frames.is_running) == (1, False)
    made = draft_of(rank, "precision bf16", dry_frames)
    assert made is not None
    assert [stage.how for stage in made.stages] == ["dry-run"]
    assert not any("estimated" in text for text in made.warnings)
    run("record", "-q", "-o", "bf16.memprof", "--precision", "bf16", "train.py")
    real = max(Trace.open("bf16.memprof").step_peaks().values())
    assert made.predicted.peak.allocated_bytes == peak_of(rank, plan, basis) == real
    both = Plan((Precision(), Checkpoint(("0", "1"))))
    run(
        "record",
        "-q",
        "-o",
        "both.memprof",
        "--precision",
        "bf16",
        "--checkpoint",
        "0",
        "--checkpoint",
        "1",
        "train.py",
    )
    assert peak_of(rank, both, basis) == max(Trace.open("both.memprof").step_peaks().values())
    assert dry_frames.finished == 1


def test_searches_continue_from_dry_runs(rank: Rank) -> None:
    """A plan with bf16 that fits has the peak of its dry run, and no error of an estimate."""
    found = find_plans(rank, SearchForm("80%", ("precision",)), DryFrames(may_run=True), lambda _: None)
    assert found.answer.best is not None
    assert found.answer.best.policies == (Precision(),)
    assert found.answer.best.interval.is_exact
    assert found.source_of(found.answer.best) == "dry-run"


@pytest.mark.parametrize("change", ["edited", "closed"])
def test_nothing_runs_otherwise(rank: Rank, change: str) -> None:
    """Of a script that was edited, the reason is that of predict; a dashboard that may run nothing estimates."""
    dry_frames = DryFrames(may_run=change != "closed")
    if change == "edited":
        Path("train.py").write_text(f"{JOB}# edited\n")
    basis, why = dry_frames.basis(rank, basis_for(rank), Plan((Precision(),)), waits=True)
    assert not basis.dry_steps
    assert ("train.py has changed since" in why) is (change == "edited")
