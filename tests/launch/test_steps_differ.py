"""Jobs whose steps differ: reports of their peak, and plans that fit all steps, applied for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memprof.cli.main import main
from memprof.trace.store import Trace
from tests.recorder.recorded import record, record_script

#: Batches of different lengths, the longest in the first recorded step.
LENGTHS = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(1000, 128), torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1000)
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for length in [64, 40, 200, 96, 32, 100, 50]:
    x = torch.randint(0, 1000, (8, length))
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(repr(loss.item()))
"""

#: Batches of different lengths from a DataLoader.
LOADED = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(1000, 128), torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1000)
)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
batches = [torch.randint(0, 1000, (8, length)) for length in [64, 40, 96, 40, LONGEST, 50, 32, 32]]
samples = [row for batch in batches for row in batch]
for x in torch.utils.data.DataLoader(samples, batch_size=8):
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

#: An evaluation on a batch that is 64 times as large, between two training steps.
EVALUATES = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
)
optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
for epoch in range(3):
    model.train()
    for batch in range(3):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(64, 256)), torch.randint(0, 10, (64,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    model.eval()
    with torch.no_grad():
        model(torch.randn(4096, 256)).argmax(1)
"""

#: The same evaluation, once, when training is over.
EVALUATES_LAST = EVALUATES.replace("range(3):\n    model.train", "range(1):\n    model.train").replace(
    "in range(3):\n        loss", "in range(4):\n        loss"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    for name, script in (("lengths", LENGTHS), ("evaluates", EVALUATES), ("last", EVALUATES_LAST)):
        made = folder / name
        made.mkdir()
        ended = record_script(made, script)
        assert ended.returncode == 0, ended.stderr
        (made / "printed").write_text(ended.stdout)
        (made / "verdict").write_text(ended.stderr)
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main(list(map(str, words))) == status
    return capsys.readouterr().out


def peaks(folder: Path) -> dict[int, int]:
    return Trace.open(folder / "run.memprof").step_peaks()


@pytest.mark.parametrize("job", ["lengths", "evaluates", "last"])
def test_the_peak_is_that_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str], job: str) -> None:
    """Every command uses the highest peak of all recorded steps, and reports how steps differ."""
    trace, found = folder / job / "run.memprof", peaks(folder / job)
    highest = max(found.values())
    assert highest > 1.5 * sorted(found.values())[-2] or job == "lengths"
    step = max(found, key=lambda number: found[number])
    assert f"in step {step}" in (folder / job / "verdict").read_text()
    assert "; steps 2 to" in (folder / job / "verdict").read_text().replace("steps 2 and", "steps 2 to")
    report = json.loads(run(capsys, "report", trace, "--json"))
    assert report["peak"]["allocated_bytes"] == highest
    assert "; steps 2" in "".join(run(capsys, "report", trace).splitlines()[:2])  # growth may come first
    assert json.loads(run(capsys, "export", trace, "--to", "summary"))["spots"]["peak"]["bytes"] == highest
    assert "recorded steps:" in run(capsys, "diff", trace, "--budget", highest - 1, status=4)
    run(capsys, "diff", trace, "--budget", highest)
    assert "already fits" in run(capsys, "suggest", trace, "--budget", highest)
    suggested = json.loads(run(capsys, "suggest", trace, "--budget", highest - 1, "--allow", "swap", "--json"))
    assert suggested["recorded"]["peak_allocated_bytes"] == highest


@pytest.mark.parametrize(
    ("job", "budget", "words"),
    [
        ("lengths", 0.6, ("--allow", "loss", "--allow", "swap")),
        ("lengths", 0.85, ("--allow", "optimizer", "--allow", "swap")),
        ("evaluates", 0.8, ("--allow", "precision")),
        ("last", 0.8, ("--allow", "precision")),
        ("last", 0.9, ("--allow", "optimizer", "--allow", "swap")),
    ],
)
def test_a_plan_holds_in_every_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], job: str, budget: float, words: tuple[str, ...]
) -> None:
    """What is suggested is applied: the run's peak is within the predicted bounds, in whichever step it is."""
    trace = folder / job / "run.memprof"
    most = int(budget * max(peaks(folder / job).values()))
    page = run(capsys, "suggest", trace, "--budget", most, *words, "--write", tmp_path / "plan.toml")
    assert "planning for the fullest" in page
    ended = record(folder / job, "--plan", str(tmp_path / "plan.toml"), "job.py", name="planned.memprof")
    if not {"precision", "loss"} & set(words):  # which round differently
        assert ended.stdout == (folder / job / "printed").read_text()
    found = ended.trace.step_peaks()
    assert max(found.values()) <= most
    told = json.loads(run(capsys, "predict", trace, "--plan", tmp_path / "plan.toml", "--json"))
    least, most = told["peak_interval_bytes"]
    assert 0.995 * least <= max(found.values()) <= 1.005 * most


def test_another_step_may_be_the_fullest_under_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks of the loss shrink the longest batch alone: the peak under the plan is that of what is left."""
    trace = folder / "evaluates" / "run.memprof"
    found = json.loads(run(capsys, "predict", trace, "--optimizer", "in-backward", "--json"))
    whole = max(peaks(folder / "evaluates").values())
    alone = json.loads(run(capsys, "predict", trace, "--optimizer", "in-backward", "--step", "2", "--json"))
    assert alone["predicted"]["peak_allocated_bytes"] < alone["recorded"]["peak_allocated_bytes"] < whole
    assert found["predicted"]["peak_allocated_bytes"] == whole


def test_like_is_compared_with_like(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prediction is compared with a step with the same shapes; without one, only the budget is compared."""
    plan, job = tmp_path / "plan.toml", folder / "lengths"
    run(capsys, "predict", job / "run.memprof", "--swap", "optimizer:disk", "--budget", "24GiB", "--write", plan)
    assert 'ran_on = "8x200"' in plan.read_text()
    longer = LENGTHS.replace("200, 96, 32", "200, 240, 32")
    record_script(job, longer, "--plan", str(plan), name="longer.memprof")
    found = json.loads(run(capsys, "verify", plan, job / "longer.memprof", "--json"))
    assert (found["unlike"], found["fits"]) == (None, True)
    assert abs(found["error"]["peak_bytes"]) < 64
    assert found["measured"]["peak_allocated_bytes"] < found["measured_bytes"]
    assert any("step 3 has a higher peak" in warning for warning in found["warnings"])
    record_script(job, LENGTHS.replace("200, 96", "100, 96"), "--plan", str(plan), name="shorter.memprof")
    page = run(capsys, "verify", plan, job / "shorter.memprof", status=3)
    assert page.startswith("the prediction cannot be compared: it is for a step on 8x200, and the run's steps ran on")
    assert "within the budget" in page
    assert "too high" not in page


def test_split_batches_are_compared_with_like(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches of a DataLoader that a plan splits show their length, so a run without the longest is not compared."""
    longest, shorter = (LOADED.replace("LONGEST", str(length)) for length in (200, 60))
    record_script(tmp_path, longest)
    plan = tmp_path / "plan.toml"
    run(capsys, "predict", tmp_path / "run.memprof", "--accumulate", "2", "--write", plan)
    record_script(tmp_path, longest, "--plan", str(plan), name="longest.memprof")
    found = json.loads(run(capsys, "verify", plan, tmp_path / "longest.memprof", "--json"))
    assert (found["unlike"], found["measured"]["peak_phase"]) == (None, "backward")
    assert abs(found["error"]["peak_bytes"]) < 4096
    record_script(tmp_path, shorter, "--plan", str(plan), name="shorter.memprof")
    page = run(capsys, "verify", plan, tmp_path / "shorter.memprof", status=3)
    assert page.startswith("the prediction cannot be compared: it is for a step on 8x200, and the run's steps ran on")
