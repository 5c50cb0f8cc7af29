"""Dry runs forked from one process: outcomes, limits of time and memory, and what is left behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from memprof.launch.dry import job_server
from memprof.launch.dry.job_server import DryRequest, JobServer
from memprof.launch.dry.rank_processes import why_not_apart
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import find_command, find_script
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.remat.policy import Remat
from memprof.trace.store import Trace

JOB = """
import os, sys, time
import torch
with open("log.txt", "a") as file:
    file.write(f"{os.getpid()} {os.getppid()}\\n")
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    loss = model(torch.randn(64, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "hang" in sys.argv:
        time.sleep(600)
"""
WINDOW = DryWindow(skip=1, steps=1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job."""
    job = tmp_path / "job"
    job.mkdir()
    (job / "train.py").write_text(JOB)
    monkeypatch.chdir(job)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return job


def test_a_job_has_as_many_threads_as_when_it_was_recorded(folder: Path) -> None:
    """Though this shell has one: what kernels of the CPU allocate depends on them. torch reads the variable."""
    (folder / "train.py").write_text("import os\nprint(os.environ['OMP_NUM_THREADS'], file=open('n.txt', 'w'))" + JOB)
    with JobServer(find_script(["train.py"]), WINDOW, threads=2) as server:
        server.run([DryRequest(None)])
    assert (folder / "n.txt").read_text() == "2\n"


def test_each_plan_has_its_own_outcome_and_recording(folder: Path, tmp_path: Path) -> None:
    """In the order of the requests; all were forked from one process, and none sees the files of another."""
    requests = [
        DryRequest(None, tmp_path / "plain.memprof"),
        DryRequest(Plan((Precision(),)), tmp_path / "bf16.memprof"),
        DryRequest(Plan((OptimizerPolicy(loop="fused"),))),
    ]
    is_apart = not why_not_apart()
    with JobServer(find_script(["train.py"]), WINDOW, apart=is_apart) as server:
        plain, short, fused = server.run(requests)
        (again,) = server.run([DryRequest(None)])
    assert plain.peak_bytes == again.peak_bytes
    assert plain.peak_bytes
    assert short.peak_bytes != plain.peak_bytes
    assert fused.peak_bytes
    assert Trace.open(tmp_path / "plain.memprof").manifest.plan is None
    assert Trace.open(tmp_path / "bf16.memprof").manifest.plan is not None
    if is_apart:
        assert [path.name for path in folder.iterdir()] == ["train.py"]
    else:
        parents = {line.split()[1] for line in (folder / "log.txt").read_text().splitlines()}
        assert len(parents) == 1


def test_one_that_hangs_is_ended_and_said_so() -> None:
    """The other outcomes stay, and no process does."""
    before = set(psutil.Process().children(recursive=True))
    with JobServer(find_script(["train.py", "hang"]), WINDOW) as server:
        (hung,) = server.run([DryRequest(None)], time.monotonic() + 4)
        (late,) = server.run([DryRequest(None)], time.monotonic() - 1)
    assert hung.peak_bytes is None
    assert hung.reason == "its dry run did not end in time."
    assert late.reason == "no time is left for its dry run (--time-limit)."
    assert not late.was_started
    assert set(psutil.Process().children(recursive=True)) <= before


def test_one_that_holds_too_much_memory_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is that of all together."""
    monkeypatch.setattr(job_server, "MOST_BYTES", 1 << 20)
    with JobServer(find_script(["train.py", "hang"]), WINDOW) as server:
        (outcome,) = server.run([DryRequest(None)], time.monotonic() + 60)
    assert "of host memory; dry runs together may hold 1.00 MiB" in outcome.reason


def test_a_plan_that_dry_runs_cannot_apply_starts_nothing() -> None:
    """The reason is that of the policy."""
    with JobServer(find_script(["train.py"]), WINDOW) as server:
        refused, applied = server.run([DryRequest(Plan((Remat(budget="1GiB"),))), DryRequest(None)])
    assert refused.peak_bytes is None
    assert "remat" in refused.reason
    assert not refused.was_started
    assert applied.peak_bytes


def test_a_plan_that_is_refused_by_the_job_is_said_so() -> None:
    """Its sentence is the outcome; the next dry run is as without it."""
    with JobServer(find_script(["train.py"]), WINDOW) as server:
        refused, plain = server.run([DryRequest(Plan((Accumulate(2),))), DryRequest(None)])
    assert refused.peak_bytes is None
    assert "DataLoader" in refused.reason
    assert plain.peak_bytes


def test_a_command_that_cannot_be_forked_is_started_anew(folder: Path, tmp_path: Path) -> None:
    """As one that starts Python by itself, or sets a variable that torch reads while it is imported."""
    (folder / "early.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'\n" + JOB)
    with JobServer(find_command(["bash", "-c", f"{sys.executable} train.py"]), WINDOW) as server:
        (shell,) = server.run([DryRequest(None)])
    with JobServer(find_script(["early.py"]), WINDOW) as server:
        (early,) = server.run([DryRequest(None)])
    assert shell.peak_bytes == early.peak_bytes
    assert os.environ["OMP_NUM_THREADS"] == "1"
