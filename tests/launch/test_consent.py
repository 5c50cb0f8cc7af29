"""`suggest` dry-runs a job unasked only if this user recorded it here and its files are unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memprof.launch.consent import find_consent, state_folder

#: Each run leaves a line outside its folder, where isolation discards nothing.
JOB = """
import os
import torch
from sizes import WIDTH
open(os.environ["RUNS"], "a").write("run\\n")
model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    loss = model(torch.randn(2048, WIDTH)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the state of a user and a folder with a job that this user recorded."""
    folder = tmp_path_factory.mktemp("consent")
    (folder / "job").mkdir()
    (folder / "job" / "train.py").write_text(JOB)
    (folder / "job" / "sizes.py").write_text("WIDTH = 64\n")
    memprof(folder, "record", "-q", "-o", "run.memprof", "train.py")
    return folder


@pytest.fixture
def user(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of both that a test may change, at the place where the original was."""
    kept = tmp_path / "kept"
    shutil.copytree(made, kept, copy_function=shutil.copy2)
    monkeypatch.setenv("XDG_STATE_HOME", str(made / "state"))
    monkeypatch.chdir(made / "job")
    yield made
    shutil.rmtree(made)
    shutil.copytree(kept, made, copy_function=shutil.copy2)


def memprof(user: Path, *words: str, folder: str = "job") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(user / "state"),
        "XDG_CACHE_HOME": str(user / "cache"),
        "RUNS": str(user / "runs"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "memprof", *words],
        cwd=user / folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def suggest(user: Path, *words: str, folder: str = "job") -> tuple[dict[str, Any], str, int]:
    """Returns the result, what was printed on stderr, and how often the job ran."""
    before = runs(user)
    search = ("suggest", "run.memprof", "--budget", "80%", "--allow", "swap", "--json")
    done = memprof(user, *search, *words, folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr, runs(user) - before


def runs(user: Path) -> int:
    return len((user / "runs").read_text().splitlines())


def test_its_own_recording_is_dry_run_once(user: Path) -> None:
    """One line says so before; the plan is confirmed; a second search repeats no dry run; --no-run makes none."""
    found, told, count = suggest(user)
    assert "suggest dry-runs python train.py without a network" in told or "suggest dry-runs" in told
    assert count > 0
    assert found["checked"][-1]["fits"]
    again, told, count = suggest(user)
    assert count == 0
    assert again["checked"] == found["checked"]
    assert again["plans"] == found["plans"]
    _, told, count = suggest(user, "--no-run")
    assert count == 0
    assert "dry-run" not in told


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda user: (user / "job" / "train.py").open("a").write("# edited\n"), "train.py has changed since"),
        (lambda user: (user / "job" / "sizes.py").write_text("WIDTH = 96\n"), "sizes.py has changed since"),
        (lambda user: (user / "job" / "sizes.py").unlink(), "sizes.py has changed since"),
        (lambda user: shutil.rmtree(user / "state"), "this user did not record it here"),
    ],
    ids=["edited", "edited import", "removed import", "from elsewhere"],
)
def test_nothing_runs_otherwise(user: Path, change: Any, why: str) -> None:
    """The sentence says why, and what to type."""
    change(user)
    found, told, count = suggest(user)
    assert count == 0
    assert found["checked"] is None or not found["checked"]
    (warning,) = [text for text in found["warnings"] if "not dry-run" in text]
    assert why in warning
    assert "--check" in warning
    assert "dry-runs python" not in told


def test_another_folder_is_named(user: Path) -> None:
    """A job may read files of its folder."""
    (user / "other").mkdir()
    shutil.copy(user / "job" / "run.memprof", user / "other")
    found, _, count = suggest(user, folder="other")
    assert count == 0
    assert any(f"it was recorded in {user / 'job'}" in text for text in found["warnings"])


def test_a_changed_recording_is_not_this_users(user: Path) -> None:
    """Its command may be another."""
    assert find_consent(Path("run.memprof")).reason == ""
    with Path("run.memprof").open("ab") as file:
        file.write(b"\0")
    assert find_consent(Path("run.memprof")).reason == "this user did not record it here"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_note_of_another_user_is_none(user: Path) -> None:
    """As where root has the home of a user."""
    for note in state_folder().iterdir():
        os.chown(note, 65534, 65534)
    assert "belongs to another user" in find_consent(Path("run.memprof")).reason


def test_a_script_that_is_edited_while_it_runs_has_no_note(user: Path) -> None:
    """The recording is of what it was before."""
    job = user / "job" / "train.py"
    job.write_text(job.read_text() + "open(__file__, 'a').write('# later')\n")
    memprof(user, "record", "-q", "-f", "-o", "run.memprof", "train.py")
    assert find_consent(Path("run.memprof")).reason == "its files changed while it was recorded"


def test_largest_scales_steps_of_dry_runs(user: Path) -> None:
    """At the recorded size a plan peaks where its dry run does; without dry runs it is estimated, which is said."""
    words = ("largest", "run.memprof", "--budget", "80%", "--allow", "precision")
    before = runs(user)
    found = memprof(user, *words, "--json")
    assert found.returncode == 0, found.stderr
    assert runs(user) > before
    told = json.loads(found.stdout)
    at = {one["size"]: one["plan"] for one in told["sizes"]}
    assert at[told["recorded_sizes"][0]]["describe"] == "precision bf16"
    before = runs(user)
    dry = json.loads(memprof(user, "predict", "run.memprof", "--precision", "bf16", "--json").stdout)
    predicted = dry["predicted"]["peak_allocated_bytes"]
    assert at[told["recorded_sizes"][0]]["peak_allocated_bytes"] == predicted
    assert "estimated, not" not in memprof(user, *words).stdout
    assert "precision bf16 is estimated, not dry-run" in memprof(user, *words, "--no-run").stdout
    assert runs(user) == before, "what was dry-run once is not again"


def test_what_the_job_refuses_in_a_dry_run_is_refused(user: Path) -> None:
    """A recording does not say that backward runs twice: predict and suggest say what the run says."""
    job = user / "job" / "train.py"
    job.write_text(
        job.read_text().replace("loss.backward()", "loss.backward(retain_graph=True), loss.mul(2).backward()")
    )
    memprof(user, "record", "-q", "-f", "-o", "run.memprof", "train.py")
    flags = ("--optimizer", "in-backward")
    run, predicted = memprof(user, "record", *flags, "train.py"), memprof(user, "predict", "run.memprof", *flags)
    assert predicted.returncode == 2
    refusal = predicted.stderr.splitlines()[-1]
    assert "a second backward ran before optimizer.step()" in refusal
    assert refusal in run.stderr.splitlines()
    flags = ("--allow", "optimizer", "--budget", "90%", "--time-limit", "300", "--json")
    done = memprof(user, "suggest", "run.memprof", *flags)
    found = json.loads(done.stdout)
    assert not [one for one in found["plans"] if one["fits"] and "in-backward" in one["describe"]]
    assert refusal.removeprefix("memprof: ") in [one["reason"] for one in found["refused"]]


MIXED = """class Mixed(torch.nn.Linear):
    def forward(self, x):
        return torch.lerp(torch.zeros(x.shape), super().forward(x), 0.5)

model ="""


def test_a_job_that_fails_under_a_policy_is_not_told_an_estimate(user: Path) -> None:
    """lerp takes no operands of two types: bf16 ends the job, which its dry run shows; --no-run estimates."""
    job = user / "job" / "train.py"
    text = job.read_text().replace("torch.nn.Linear(", "Mixed(").replace("model =", MIXED)
    job.write_text(text)
    memprof(user, "record", "-q", "-f", "-o", "run.memprof", "train.py")
    predicted = memprof(user, "predict", "run.memprof", "--precision", "bf16")
    assert predicted.returncode == 2
    assert "the job failed in a dry run, it ended with status 1: RuntimeError: expected dtype" in predicted.stderr
    assert memprof(user, "predict", "run.memprof", "--precision", "bf16", "--no-run").returncode == 0
    flags = ("--allow", "precision", "--budget", "90%", "--time-limit", "300", "--json")
    done = memprof(user, "suggest", "run.memprof", *flags)
    found = json.loads(done.stdout)
    assert not [one for one in found["plans"] if one["fits"]]
    assert "the job failed in a dry run" in found["refused"][0]["reason"]
