"""`memprof suggest --check`: plans are dry-run as applied, and the first that fits is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.plans.basis import basis_of
from memprof.analysis.plans.suggest import Suggestion, suggest
from memprof.cli.main import main
from memprof.cli.verbs.plans.dry_runs import check_plans, find_checks
from memprof.planners.search.request import SearchRequest
from memprof.policies.plan.plan_file import read_plan
from memprof.policies.plan.several_steps import DrySteps
from memprof.trace.store import Trace
from tests.scripts import net_of_blocks

#: Another MiB as soon as any module is checkpointed: as much as no prediction could know.
TRAINING = (
    net_of_blocks(6)
    + """\
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(512, 64)).square().mean()
    planned = any("forward" in module.__dict__ for module in model.modules())
    extra = torch.ones(2**18) if planned and "heavy" in sys.argv else None
    loss.backward()
    optimizer.step()
    print("step", step)
"""
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the job and its two recordings, of which one's plans take more than predicted."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "train.py").write_text(TRAINING)
    for name in ("light", "heavy"):
        subprocess.run(
            [sys.executable, "-m", "memprof", "record", "-q", "--stop", "-o", f"{name}.memprof", "train.py", name],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            timeout=240,
        )
    return folder


@pytest.fixture(autouse=True)
def here(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")


def run(capfd: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["suggest", *words]) == status
    captured = capfd.readouterr()
    # What the job prints in a dry run are made-up values.
    assert "step" not in captured.err
    return captured.out


def checked(text: str) -> list[dict[str, Any]]:
    found = json.loads(text)["checked"]
    assert isinstance(found, list)
    return found


def test_best_plan_is_confirmed_by_a_dry_run(capfd: pytest.CaptureFixture[str]) -> None:
    """The dry run confirms the prediction to the byte; the check stops there, and the plan is kept."""
    page = run(
        capfd, "light.memprof", "--budget", "70%", "--allow", "checkpoint,swap", "--check", "--write", "kept.toml"
    )
    assert " Confirmed by a dry run: peak " in page.splitlines()[0]
    rows = [line for line in page.splitlines() if line.endswith("as predicted  fits")]
    assert len(rows) == 1
    plan = read_plan("kept.toml")
    assert rows[0].startswith(plan.describe())
    assert "next: memprof record --plan kept.toml train.py light" in page


def test_steps_of_the_recording_are_checked(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is predicted for the fullest recorded step, the fourth: the dry run reaches it, and agrees to the byte."""
    monkeypatch.chdir(tmp_path)
    longer = TRAINING.replace("torch.randn(512, 64)", "torch.randn(1024 if step == 3 else 512, 64)")
    Path("train.py").write_text(longer)
    record = [sys.executable, "-m", "memprof", "record", "-q", "--stop", "-o", "run.memprof", "train.py"]
    subprocess.run(record, check=True, capture_output=True, timeout=240)
    (one,) = checked(run(capfd, "run.memprof", "--budget", "70%", "--allow", "checkpoint", "--check", "--json"))
    assert one["dry_run_peak_allocated_bytes"] == one["predicted_peak_allocated_bytes"]


def test_plans_that_do_not_fit_as_applied_are_said_to_and_none_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """A MiB more than predicted is over the budget: exit code 4, the difference in bytes and as a share, no file."""
    words = ["heavy.memprof", "--budget", "80%", "--allow", "checkpoint", "--write", "none.toml", "--json"]
    text = run(capfd, *words, "--check", "1", status=4)
    (one,) = checked(text)
    assert one["fits"] is False
    assert one["difference_bytes"] == 2**20
    assert one["dry_run_peak_allocated_bytes"] == one["predicted_peak_allocated_bytes"] + 2**20
    assert one["difference_ratio"] == pytest.approx(2**20 / one["predicted_peak_allocated_bytes"])
    assert not Path("none.toml").exists()


def test_what_a_dry_run_took_more_is_searched_with_again(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The next plan checked leaves a MiB of room for the MiB that the first took more, and is the one kept."""
    kept = tmp_path / "kept.toml"
    words = ["heavy.memprof", "--budget", "80%", "--allow", "checkpoint", "--write", str(kept), "--json"]
    found = json.loads(run(capfd, *words, "--check"))
    first, second = found["checked"]
    assert (first["fits"], second["fits"]) == (False, True)
    assert (
        second["predicted_peak_allocated_bytes"]
        <= found["budget_bytes"] - 2**20
        < first["dry_run_peak_allocated_bytes"]
    )
    assert read_plan(kept).describe() == second["describe"]
    assert second["predicted_peak_allocated_bytes"] in [one["peak_allocated_bytes"] for one in found["plans"]]


def test_where_the_job_is_not_there_one_sentence_says_so(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Path
) -> None:
    """The search is shown all the same; nothing was checked."""
    monkeypatch.chdir(tmp_path)
    text = run(capfd, str(job / "light.memprof"), "--budget", "70%", "--allow", "checkpoint", "--check", "--json")
    assert checked(text) == []
    assert [one for one in json.loads(text)["warnings"] if one.startswith("no plan was checked: no script")]


def test_plans_are_kept_where_no_time_is_left_for_dry_runs() -> None:
    """Neither the dry run of a frame nor that of the plan begins; another search has no time, and finds as much."""
    trace = Trace.open("light.memprof")
    basis = basis_of(trace, None, None)
    request = SearchRequest(int(0.7 * basis.peak_bytes), allow=("checkpoint", "precision"), is_checked=True)

    def search(again: SearchRequest, dry_steps: DrySteps, before: Suggestion) -> Suggestion:
        late = replace(again, time_limit_s=0.0)
        return suggest(trace, replace(basis, dry_steps=dry_steps), late, before=before)

    found = suggest(trace, basis, request)
    end = time.monotonic()
    late, nothing = check_plans(
        found, 2, search, find_checks("light.memprof", trace.manifest, basis, deadline=end), end
    )
    assert nothing == ()
    assert late.warnings[-1] == "no plan was checked: no time is left for its dry run (--time-limit)."
    sure = [one.policies for one in found.plans if one.interval.most_bytes <= request.budget_bytes]
    assert sure
    kept = [one.policies for one in late.plans]  # and the simplest, where the step's times make it worth a line
    assert kept[0] == sure[0]
    assert all(policies in kept for policies in sure)


def test_without_check_nothing_is_said_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    """JSON has the key with null, and the page names the way to check."""
    words = ["light.memprof", "--budget", "70%", "--allow", "checkpoint"]
    assert json.loads(run(capfd, *words, "--json"))["checked"] is None
    assert "--check  dry-run the job under it" in run(capfd, *words)


@pytest.mark.parametrize("option", ["--at-batch=4", "--explain=1"])
def test_check_is_of_the_job_as_it_was_recorded(capfd: pytest.CaptureFixture[str], option: str) -> None:
    """What asks for another size, or shows one plan, does not go with it: exit code 2 before anything is searched."""
    assert main(["suggest", "light.memprof", "--budget", "70%", option, "--check"]) == 2
    assert "--check dry-runs the job as it was recorded" in capfd.readouterr().err


def test_no_more_dry_runs_than_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    """Each plan is over its budget as applied, and the check ends with the first all the same."""
    words = ["heavy.memprof", "--budget", "80%", "--check", "1", "--json"]
    found = json.loads(run(capfd, *words, "--allow", "checkpoint,swap", status=4))
    assert len(found["plans"]) > 1
    assert [one["fits"] for one in found["checked"]] == [False]
