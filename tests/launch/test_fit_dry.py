"""`memprof fit` makes dry runs before real ones, and skips them where a job cannot be dry-run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.cli.options.search_options import read_search_request
from memprof.launch.fit.rehearsal import Rehearsal
from memprof.launch.fit.request import FitResult, Measured, Request, claim_outputs
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import find_script
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.trace.manifest import Machine, Manifest
from tests.launch.test_fit import HEAVIER, TRAINING

#: Without a plan, a run that is none of a dry one asks for a GiB where the process may have 16 MiB more than it has.
RUNS_OUT = """
    planned = any("forward" in module.__dict__ for module in model.modules())
    if not planned and not isinstance(loss, torch._subclasses.fake_tensor.FakeTensor):
        import resource
        with open("/proc/self/statm") as statm:
            taken = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2**24, resource.RLIM_INFINITY))
        torch.ones(2**28)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def fit(more: str, *words: str) -> tuple[dict[str, object], list[dict[str, object]], str]:
    Path("train.py").write_text(TRAINING.replace("    {more}", more if more.startswith("\n") else f"    {more}"))
    options = ["--skip", "1", "--steps", "1", "-o", "out", "--allow", "checkpoint", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "memprof", "fit", *options, *words, "train.py"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return told, told["attempts"], done.stderr


def test_plan_whose_dry_run_is_above_the_budget_costs_no_real_run() -> None:
    """It is passed over and the search tightened; the next fits in its dry run, and is measured at just that."""
    told, attempts, errors = fit(HEAVIER, "--budget", "80%")
    first, *_, last = attempts
    assert first["outcome"] == "passed over"
    assert first["measured"] is None
    assert isinstance(first["dry_run"], dict)
    assert first["dry_run"]["difference_bytes"] == 2**20
    assert first["dry_run"]["peak_allocated_bytes"] > told["budget_bytes"]
    assert last["outcome"] == "fits"
    assert isinstance(last["dry_run"], dict)
    assert isinstance(last["measured"], dict)
    assert last["dry_run"]["peak_allocated_bytes"] == last["measured"]["peak_allocated_bytes"]
    assert errors.count("step 2\n") == 2  # as it is, and under the one plan that was run
    assert "above the budget, skipped" in errors


@pytest.mark.slow
def test_job_that_runs_out_of_memory_is_planned_for_from_its_dry_run() -> None:
    """Its dry run is the baseline and said to be; the plan found there is measured in a real run."""
    told, attempts, errors = fit(RUNS_OUT, "--budget", "70%")
    assert "ran out of memory, it ended with status 1: its dry run is the baseline" in errors
    assert told["recorded_in_dry_run"] is True
    assert told["fits"]
    assert not told["fits_as_it_is"]
    assert attempts[-1]["outcome"] == "fits"
    assert any("is a dry run" in str(warning) for warning in told["warnings"])  # type: ignore[attr-defined]


def rehearsal(script: str, recorded_bytes: int, device: str = "") -> tuple[Rehearsal, FitResult, list[str]]:
    Path("train.py").write_text(script)
    request = Request(
        target=find_script(["train.py"]),
        outputs=claim_outputs(Path("out"), "train", force=False),
        search_request=read_search_request("1GiB", None, (), (), None, 60.0),
        dry_window=DryWindow(),
    )
    found = FitResult(request, recorded=Measured(recorded_bytes, 1.0, 0))
    said: list[str] = []
    manifest = dataclasses.replace(
        Manifest(), machine=Machine(device_name=device, device_kind="cuda" if device else "cpu")
    )
    return Rehearsal(found, manifest, said.append), found, said


def test_job_that_cannot_be_dry_run_is_left_to_real_runs_and_said_once() -> None:
    """A refused dry run is reported once, with a warning, and not repeated."""
    script = (
        "import torch\nlibrary = torch.library.Library('mine', 'DEF')\nlibrary.define('odd(Tensor x) -> Tensor')\n"
        "library.impl('odd', torch.clone, 'CPU')\nmodel = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "(model(torch.ones(1)) + torch.ops.mine.odd(torch.ones(1))).backward()\noptimizer.step()\n"
    )
    runs, found, said = rehearsal(script, 1000)
    plan = Plan((Checkpoint(modules=("0",)),))
    assert runs.dry_run(plan).peak_bytes is None
    assert runs.dry_run(plan).peak_bytes is None
    (sentence,) = said
    assert "the job cannot be dry-run: mine::odd cannot be dry-run: its result shape is unknown" in sentence
    assert sentence.endswith("plans are tried in real runs only.")
    assert found.warnings == (sentence,)


def test_dry_run_that_is_not_what_was_recorded_decides_nothing() -> None:
    """More than 1 % off the measured job: only real runs decide."""
    runs, _, said = rehearsal(TRAINING.replace("{more}", "pass"), 2**30)
    assert runs.dry_run(Plan((Checkpoint(modules=("layers.0",)),))).peak_bytes is None
    assert "a dry run of the unmodified job peaks at 5." in said[0]


def test_device_that_nobody_knows_is_left_to_real_runs() -> None:
    """Nothing is started for it."""
    runs, _, said = rehearsal("raise SystemExit('started')", 1000, "Abacus 9")
    assert runs.dry_run(Plan((Checkpoint(modules=("0",)),))).peak_bytes is None
    assert "recorded on Abacus 9" in said[0]
