"""How a run under a plan ends: within its budget, over it, or killed, and the next command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memprof.analysis.plans.another_plan import PlannedJob
from memprof.launch.outcome import plan_marks
from memprof.launch.outcome.plan_marks import policy_at_fault
from memprof.launch.outcome.plan_verdict import Ended, add_budget, add_plan
from memprof.launch.outcome.verdict import Verdict
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import read_plan, write_plan
from memprof.policies.swap.policy import Swap
from memprof.units import spell_bytes

TRAINING = """
import os, signal, sys, torch
from torch import nn
mode, at = [*sys.argv[1:], *["", "-1"][len(sys.argv) - 1 :]]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        self.layers = nn.Sequential(*(block() for _ in range(6)))
    def forward(self, x):
        return self.layers(x)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters())
for step in range(7):
    optimizer.zero_grad()
    loss = model(torch.randn(1024 if mode == "long" and step == 3 else 512, 64)).square().mean()
    if step == int(at):
        if mode == "oom":
            torch.zeros(1 << 44)
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        if mode == "error":
            raise ValueError("a mistake in the job")
        if mode == "policy":  # what swap brings back, it brings back no more
            from memprof.policies.swap import packing
            packing._Packed.unpack = None
    loss.backward()
    optimizer.step()
"""


def memprof(*words: str, folder: Path) -> tuple[int, list[str]]:
    """Runs memprof; returns its exit status and what it says, without its name in front."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "memprof.cli.main", *words],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = done.stdout if words[0] in ("verify", "diff") else done.stderr
    lines = [
        line.removeprefix("memprof: ") for line in said.splitlines() if words[0] != "record" or "memprof: " in line
    ]
    return done.returncode, lines


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job, its recording, and plans for a budget of 70 %: one of suggest, one of a person, one that swaps."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(TRAINING)
    assert memprof("record", "-q", "-o", "run.memprof", "train.py", folder=folder)[0] == 0
    asked = ("run.memprof", "--budget", "70%", "--allow", "checkpoint", "--write", "plan.toml")
    assert memprof("suggest", *asked, folder=folder)[0] == 0
    asked = ("run.memprof", "--swap", "layers.*:disk", "--budget", "70%", "--write", "swap.toml")
    assert memprof("predict", *asked, folder=folder)[0] == 0
    (folder / "mine.toml").write_text('budget = "2MiB"\n[checkpoint]\nmodules = "layers.*"\n')
    return folder


def recorded(job: Path, *words: str) -> tuple[int, list[str]]:
    return memprof("record", "-f", "-o", "head.memprof", *words, folder=job)


def test_within_the_budget(job: Path) -> None:
    """The prediction, the budget, and the comparison in full; a CI job that is to fail over the budget does not."""
    status, said = recorded(job, "--fail-over-budget", "--plan", "plan.toml", "train.py")
    assert status == 0
    assert ": exact." in said[1]
    assert re.fullmatch(r"within the budget, measured: 4\.\d\d of 4\.\d\d MiB\.", said[2])
    assert said[3:] == ["next: memprof verify plan.toml head.memprof"]
    status, page = memprof("diff", "head.memprof", folder=job)
    assert (status, page[1]) == (0, said[2])


def test_over_the_budget_in_another_step_than_the_steady_one(job: Path) -> None:
    """It is named, and so are the commands for a plan with as much more room; the job's status is its own."""
    plan = read_plan(job / "plan.toml")
    assert plan.budget_bytes is not None
    status, said = recorded(job, "--plan", "plan.toml", "train.py", "long")
    assert status == 0
    assert ": exact." in said[1]
    assert re.fullmatch(r"OVER the budget by \d\.\d\d MiB: \d\.\d\d of 4\.\d\d MiB in step 3\.", said[2])
    search, train = said[3:]
    assert re.fullmatch(r"next: memprof suggest run\.memprof --budget \S+MiB --write plan-2\.toml", search)
    assert train == (f"then: memprof record --plan plan-2.toml --budget {spell_bytes(plan.budget_bytes)} train.py long")
    for verb in (("verify", "plan.toml", "head.memprof"), ("diff", "head.memprof")):
        status, page = memprof(*verb, folder=job)
        assert status == 4
        assert said[2] in page
        assert any(line.startswith(search) for line in page)
    assert recorded(job, "--fail-over-budget", "-q", "--plan", "plan.toml", "train.py", "long") == (4, [said[2]])


@pytest.mark.slow
def test_a_budget_without_a_plan(job: Path) -> None:
    """The recording is there to plan from; a budget is needed to fail over it, and a share is of a known peak."""
    status, said = recorded(job, "--budget", "2MiB", "--fail-over-budget", "train.py")
    assert status == 4
    assert said[1].startswith("OVER the budget by ")
    assert said[2:] == [
        "next: memprof suggest head.memprof --budget 2.00MiB --write plan-2.toml",
        "then: memprof record --plan plan-2.toml train.py",
    ]
    for words in (("--fail-over-budget",), ("--budget", "60%"), ("--budget", "none")):
        assert recorded(job, *words, "train.py")[0] == 2


def test_a_plan_by_hand(job: Path) -> None:
    """Its budget counts without a prediction, in verify as well; --budget outweighs it, and is recorded."""
    status, said = recorded(job, "--plan", "mine.toml", "train.py")
    assert status == 0
    assert said[1].startswith("OVER the budget by ")
    assert said[2:] == ["next: memprof fit --budget 2.00MiB train.py"]
    status, page = memprof("verify", "mine.toml", "head.memprof", folder=job)
    assert (status, page[0]) == (4, said[1])
    assert page[1].startswith("next: memprof fit --budget 2.00MiB train.py")
    status, said = recorded(job, "--plan", "mine.toml", "--budget", "1GiB", "train.py")
    assert said[1].startswith("within the budget, measured: ")
    assert memprof("diff", "head.memprof", folder=job)[0] == 0


@pytest.mark.slow
def test_a_dry_run_says_so(job: Path) -> None:
    """Nothing was measured in it."""
    status, said = recorded(job, "--dry-run", "--fail-over-budget", "--plan", "plan.toml", "train.py")
    assert status == 0
    assert said[2].startswith("within the budget, in a dry run: ")


@pytest.mark.slow
def test_a_light_recording_compares_the_whole_run(job: Path) -> None:
    """Its highest step is one that was not recorded in full, or that was: every step counts."""
    status, said = recorded(job, "--light", "--fail-over-budget", "--plan", "plan.toml", "train.py", "long")
    assert status == 4
    assert re.search(r"^OVER the budget by .* in step 3\.$", "\n".join(said), re.MULTILINE)


def test_memory_runs_out_under_a_plan(job: Path) -> None:
    """The plan is named, the warm-up is compared with nothing, and the next plan needs a good deal less."""
    status, said = recorded(job, "--fail-over-budget", "--plan", "plan.toml", "train.py", "oom", "1")
    assert status == 1
    assert said[0].startswith("out of memory: ")
    (line,) = (line for line in said if line.startswith("it ran under plan.toml: checkpoint "))
    assert line.endswith("Its prediction is not compared: no complete step after the warm-up was recorded.")
    assert not any("predicted peak" in line or "the budget," in line for line in said)
    assert re.fullmatch(r"next: memprof suggest run\.memprof --budget \S+iB --write plan-2\.toml", said[-2])
    assert said[-1].startswith("then: memprof record --plan plan-2.toml --budget ")


@pytest.mark.slow
def test_memory_runs_out_after_the_window(job: Path) -> None:
    """Recorded steps within the budget are compared, but are no verdict on the run."""
    status, said = recorded(job, "--plan", "plan.toml", "train.py", "oom", "6")
    assert status == 1
    (line,) = (line for line in said if line.startswith("it ran under plan.toml: "))
    assert "In the steps recorded: predicted peak " in line
    assert not any(line.startswith("within the budget") for line in said)
    assert said[-2].startswith("next: memprof suggest run.memprof --budget ")


@pytest.mark.parametrize("at", ["0", "1"])
def test_killed_under_a_plan(job: Path, at: str) -> None:
    """Before anything was recorded as well; SIGKILL is most often for memory."""
    status, said = recorded(job, "--plan", "plan.toml", "train.py", "kill", at)
    assert status == -signal.SIGKILL
    assert any(line.startswith("it ran under plan.toml: checkpoint ") for line in said)
    assert said[-2].startswith("next: memprof suggest run.memprof --budget ")


@pytest.mark.slow
def test_ended_by_somebody(job: Path) -> None:
    """The plan did not cause the failure: no other plan is searched for."""
    status, said = recorded(job, "--plan", "plan.toml", "train.py", "term", "1")
    assert status == -signal.SIGTERM
    assert any(line.startswith("its prediction is not compared: ") for line in said)
    assert said[-1] == "next: memprof report head.memprof"


def test_an_error_of_the_job(job: Path) -> None:
    """Only a run without the plan shows whether it fails without it as well."""
    status, said = recorded(job, "--plan", "plan.toml", "train.py", "error", "1")
    assert status == 1
    assert said[-1] == "next: memprof record --stop -o without-plan.memprof train.py error 1"


def test_an_error_of_a_policy(job: Path) -> None:
    """It is named, and left out of the next search, at the same budget."""
    status, said = recorded(job, "--plan", "swap.toml", "train.py", "policy", "1")
    assert status == 1
    assert any("The error was raised in its policy swap." in line for line in said)
    assert re.fullmatch(r"next: memprof suggest run\.memprof --budget \S+ --forbid swap --write swap-2\.toml", said[-2])
    assert said[-1] == "then: memprof record --plan swap-2.toml train.py policy 1"


def test_a_policy_that_does_not_fit(job: Path) -> None:
    """Below the refusal stands what finds a plan without it; quiet, or with a pattern misspelt, the refusal alone."""
    (job / "refused.toml").write_text((job / "plan.toml").read_text() + "\n[accumulate]\nmicro_batches = 2\n")
    (job / "typo.toml").write_text((job / "plan.toml").read_text().replace("layers.0", "layer.0"))
    status, said = recorded(job, "--plan", "refused.toml", "train.py")
    assert status == 125
    assert said[0].startswith("accumulate cannot split this job's batches")
    assert "Its policy accumulate does not fit." in said[1]
    assert said[2].startswith("next: memprof suggest run.memprof --budget ")
    assert said[2].endswith(" --forbid accumulate --write refused-2.toml")
    assert recorded(job, "-q", "--plan", "refused.toml", "train.py") == (125, said[:1])
    assert len(recorded(job, "--plan", "typo.toml", "train.py")[1]) == 1


def raised_in(*names: str) -> BaseException:
    """Returns an error raised in nested frames of these files, outermost first."""
    names_left = list(names)

    def call() -> None:
        if not names_left:
            raise RuntimeError("broken")
        exec(compile("call()", names_left.pop(0), "exec"), {"call": call})

    try:
        call()
    except RuntimeError as error:
        # The frames of this file are the job's: only the files' own are left.
        trace = error.__traceback__
        kept = []
        while trace is not None:
            if trace.tb_frame.f_code.co_filename in names:
                kept.append(trace)
            trace = trace.tb_next
        for outer, inner in zip(kept, [*kept[1:], None], strict=True):
            outer.tb_next = inner
        return error.with_traceback(kept[0] if kept else None)
    raise AssertionError


def test_who_is_at_fault() -> None:
    """The policy whose code comes last, but for the recorder and torch; never where the job's or a module's does."""
    package = str(Path(plan_marks.__file__).parents[2])
    library = str(Path(torch.__file__).parent)
    swap, shared = f"{package}/policies/swap/moves.py", f"{package}/policies/runtime/job.py"
    assert policy_at_fault(raised_in("train.py", swap)) == "swap"
    assert policy_at_fault(raised_in("train.py", swap, f"{library}/autograd/graph.py")) == "swap"
    assert policy_at_fault(raised_in("train.py", swap, shared, f"{package}/recorder/operators.py")) == "swap"
    assert policy_at_fault(raised_in("train.py", swap, "model.py")) == ""
    assert policy_at_fault(raised_in("train.py", swap, f"{library}/nn/modules/linear.py")) == ""
    assert policy_at_fault(raised_in("train.py", swap, f"{package}/policies/plan/patterns.py")) == ""
    assert policy_at_fault(raised_in("train.py", shared)) == ""
    assert policy_at_fault(MemoryError()) == ""


def test_host_memory_that_swap_filled(tmp_path: Path) -> None:
    """A job on a device that the kernel kills for host memory is planned without what fills it."""
    write_plan(tmp_path / "plan.toml", Plan((Swap(to="host"),), budget_bytes=1 << 30))
    job = PlannedJob(read_plan(tmp_path / "plan.toml"), tmp_path / "plan.toml", "train.py")
    verdict = add_plan(Verdict("nothing"), job, Ended(has_failed=True, ran_out=True, was_killed=True), None)
    assert "swap keeps in host memory what it moves off the device." in verdict.comparison
    assert verdict.next_command == "memprof fit --budget 1.00GiB --forbid swap train.py"


def test_a_recording_that_cannot_be_read(tmp_path: Path) -> None:
    """Is a clause of the verdict, and nothing that is raised."""
    (tmp_path / "broken.memprof").write_text("nothing")
    verdict = add_budget(Verdict("recorded"), None, 1 << 30, tmp_path / "broken.memprof", "train.py")
    assert verdict.budget_sentence.startswith("cannot determine whether it is within the budget of 1.00 GiB: ")
    assert verdict.budget is not None
    assert verdict.budget.exit_code == 3
