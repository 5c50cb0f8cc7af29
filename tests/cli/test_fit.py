"""`memprof fit` as it is typed and read; what it does to jobs is in tests/launch/test_fit.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.cli.main import main
from memprof.policies.plan.plan_file import read_plan

TRAINING = """
import sys, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        self.layers = nn.Sequential(*(block() for _ in range(6)))
    def forward(self, x):
        return self.layers(x)
print("words", *sys.argv[1:])
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(512, 64)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").write_text(TRAINING)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str, status: int = 2) -> str:
    assert main(["fit", *words]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    # Nothing was begun.
    assert sorted(path.name for path in Path().iterdir()) == ["train.py"]
    return captured.err


def test_page_ends_with_what_to_do_next() -> None:
    """Stdout contains only the result: the plan, predicted and measured, code to paste, the full run; of two plans
    verified, the one measured to be faster is kept."""
    options = [
        "--budget",
        "70%",
        "--allow",
        "checkpoint,swap",
        "--no-dry-run",
        "--verify",
        "2",
        "-o",
        "fits.toml",
        "--skip",
        "1",
        "--steps",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "memprof", "fit", *options, "train.py", "--lr", "1"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    plan = read_plan("fits.toml")
    assert lines[0].startswith("Within the budget, measured: ")
    assert plan.describe() in lines[0]
    assert lines[1].startswith("as it is: peak ")
    rows = [line for line in lines if "within the budget" in line]
    assert len(rows) == 2
    assert sum("kept" in row for row in rows) == 1
    for row in ("peak ", "step time "):
        assert any(line.startswith(row) for line in lines)
    assert "    import memprof" in lines
    assert "    memprof.apply('fits.toml', model, optimizer)" in lines
    assert lines[-1].startswith("next: memprof record --plan fits.toml train.py --lr 1")
    # What the job prints goes to stderr, among what is being done.
    assert done.stderr.count("words --lr 1") == 3
    assert "memprof: recording train.py without a plan" in done.stderr
    names = sorted(path.name for path in Path().iterdir())
    assert names == ["fits.head.memprof", "fits.run.memprof", "fits.toml", "train.py"]


def test_mistakes_are_told_before_the_job_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """What is asked for is read first: no job is run in vain."""
    assert "a budget is needed" in refused(capsys, "train.py")
    assert "invalid share of the recorded peak 'x%'" in refused(capsys, "--budget", "x%", "train.py")
    assert "unknown policy 'magic'" in refused(capsys, "--budget", "1GiB", "--allow", "magic", "train.py")
    assert "invalid slowdown" in refused(capsys, "--budget", "1GiB", "--max-slowdown", "-3", "train.py")
    assert "memprof fit train.py" in refused(capsys, "--budget", "1GiB")
    assert "memprof fit --budget 1GiB -- ls" in refused(capsys, "--budget", "1GiB", "ls", status=127)
    assert "exceeds the memory" in refused(capsys, "--budget", "80GiB", "--machine", "rtx3090", "train.py")


@pytest.mark.cold
def test_job_without_training_is_no_plan(capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 3, a message with the reason, and no files left."""
    Path("train.py").write_text("print('nothing')")
    assert main(["fit", "--budget", "60%", "-o", "out", "train.py"]) == 3
    captured = capfd.readouterr()
    assert "never imported torch" in captured.err
    assert captured.out == ""
    assert not Path("out").exists()


def test_json_of_a_job_that_failed(capfd: pytest.CaptureFixture[str]) -> None:
    """Stable keys whatever came of it, and the job's own exit status."""
    Path("train.py").write_text("import sys; sys.exit(9)")
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--budget", "60%", "-o", "out", "--json", "train.py"])
    assert ended.value.code == 9
    told = json.loads(capfd.readouterr().out)
    assert set(told) == {
        "schema",
        "target",
        "budget_bytes",
        "measured_bytes",
        "fits",
        "fits_as_it_is",
        "recorded_in_dry_run",
        "recorded",
        "attempts",
        "plan",
        "least_measured_bytes",
        "files",
        "code",
        "next",
        "reason",
        "ended_by",
        "warnings",
    }
    assert told["fits"] is False
    assert told["files"] == {"plan": None, "run": None, "head": None}
