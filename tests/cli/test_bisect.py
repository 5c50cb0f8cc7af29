"""`memprof history`, also with `--bisect`: regressions planted among 200 commits are found and explained."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HISTORY = "memory-history.jsonl"

JOB = """\
import torch
from config import BATCH, DTYPE, WIDTH
from net import Net

torch.manual_seed(0)
model = Net(WIDTH).to(DTYPE)
optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)
history = []
for step in range(6):
    loss = model(torch.randn(BATCH, WIDTH, dtype=DTYPE)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {after}
"""

NET = """\
import torch


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range({blocks}))

    def forward(self, x):
        for block in self.blocks:
            x = {call}
        return x
"""

#: What the repository holds before a regression.
BEFORE: dict[str, str] = {
    "optimizer": "SGD",
    "after": "pass",
    "blocks": "4",
    "call": "block(x).relu()",
    "batch": "256",
    "dtype": "torch.float32",
}
#: What each regression changes, the gate that finds it, and a part of the explanation.
REGRESSIONS: dict[str, tuple[dict[str, str], str, str]] = {
    "adam": ({"optimizer": "AdamW"}, "peak>+1%", "optimizer"),
    "batch": ({"batch": "320"}, "peak>+1%", "batch differs"),
    "blocks": ({"blocks": "6"}, "peak>+1%", "parameters"),
    "dtype": ({"dtype": "torch.float64"}, "peak>+1%", "float64"),
    "softplus": ({"call": "torch.nn.functional.softplus(block(x)).relu()"}, "peak>+1%", "net.py"),
    "leak": ({"after": "history.append(torch.ones(1000, 16))"}, "growth>0", "memory grows by 62.50 KiB per step"),
}


def plant(folder: Path, first_bad: int, change: dict[str, str], count: int = 200) -> None:
    """Makes a repository of commits, of which one changes the job's memory and the others only text."""
    subprocess.run(["git", "init", "-q", "-b", "main", str(folder)], check=True, capture_output=True)
    stream: list[str] = []
    for number in range(count):
        now = BEFORE | (change if number >= first_bad else {})
        files = {
            "train.py": JOB.format(**now) + f"# revision {number}\n",
            "net.py": f"# revision {number}\n" + NET.format(**now),
            "config.py": f"import torch\nBATCH = {now['batch']}\nWIDTH = 128\nDTYPE = {now['dtype']}\n",
            "pyproject.toml": "[tool.memprof.dry_run]\nisolate = false\nskip = 1\nsteps = 3\n",
        }
        subject = f"change {number}"
        stream.append(f"commit refs/heads/main\nauthor A <a@example.org> {1_800_000_000 + number} +0000\n")
        stream.append(f"committer A <a@example.org> {1_800_000_000 + number} +0000\ndata {len(subject)}\n{subject}\n")
        stream += [f"M 100644 inline {name}\ndata {len(text)}\n{text}\n" for name, text in files.items()]
    subprocess.run(["git", "-C", str(folder), "fast-import", "--quiet"], input="".join(stream), text=True, check=True)
    subprocess.run(["git", "-C", str(folder), "reset", "-q", "--hard", "main"], check=True)


def memprof(folder: Path, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "memprof", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def _bisect(folder: Path, first_bad: int, name: str, count: int = 200, most_runs: int = 9) -> dict[str, Any]:
    change, gate, words = REGRESSIONS[name]
    plant(folder, first_bad, change, count)
    done = memprof(
        folder,
        "history",
        "--bisect",
        f"main~{count - 1}..main",
        "--json",
        "--fail-on",
        gate,
        "--",
        str(folder / "train.py"),
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["culprit"]["subject"] == f"change {first_bad}"
    assert found["before"]["subject"] == f"change {first_bad - 1}"
    assert found["runs"] == len(found["measured"]) <= most_runs
    assert words in " ".join(cause["sentence"] for cause in found["causes"])
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True).stdout
    assert changed == ""
    return found


def test_a_planted_regression_is_found(tmp_path: Path) -> None:
    """The commit of 3 that enlarged the batch is named after 3 dry runs, with its files and its cause."""
    found = _bisect(tmp_path, 2, "batch", count=3, most_runs=3)
    assert found["causes"][0]["kind"] == "batch"
    assert found["files"] == ["config.py", "net.py", "train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("name", REGRESSIONS)
@pytest.mark.parametrize("seed", range(3))
def test_every_planted_regression_is_found_in_200_commits(tmp_path: Path, name: str, seed: int) -> None:
    """Optimizers, batches, layers, types, operators and leaks, at random commits and at both ends: 9 runs at most."""
    first_bad = (1, 199, random.Random(name).randint(2, 198))[seed]
    _bisect(tmp_path, first_bad, name)


@pytest.mark.slow
def test_a_regression_is_found_in_the_branch_of_a_merge(tmp_path: Path) -> None:
    """The first bad commit on the main line is a merge: the commit of its branch is named, and the merge."""
    plant(tmp_path, 99, {}, 3)

    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.org", *words],
            check=True,
            capture_output=True,
        )

    def commit(name: str, text: str, subject: str) -> None:
        (tmp_path / name).write_text(text)
        git("add", name)
        git("commit", "-q", "-m", subject)

    git("checkout", "-q", "-b", "side", "main~1")
    commit("notes.txt", "one\n", "side 1")
    commit("net.py", NET.format(**(BEFORE | {"blocks": "6"})), "side 2: wider")
    commit("notes.txt", "two\n", "side 3")
    git("checkout", "-q", "main")
    git("merge", "-q", "--no-ff", "-X", "theirs", "-m", "merge side", "side")
    commit("notes.txt", "three\n", "change 4")
    found = json.loads(memprof(tmp_path, "history", "--bisect", "main~3..main", "--json", "--", "train.py").stdout)
    assert found["culprit"]["subject"] == "side 2: wider"
    assert found["before"]["subject"] == "side 1"
    assert [one["subject"] for one in found["merges"]] == ["merge side"]
    assert "net.py" in found["files"]
    done = memprof(tmp_path, "history", "--bisect", "main~3..main", "-o", "h.jsonl", "--", "train.py")
    assert "merge side" in done.stdout


@pytest.mark.slow
def test_a_history_is_kept_and_drawn(tmp_path: Path) -> None:
    """Commits are run once, the change is marked and explained, and bisect takes what is known."""
    plant(tmp_path, 3, REGRESSIONS["adam"][0], count=6)
    first = memprof(tmp_path, "history", "--commits", "main~4..main", "train.py")
    assert first.stderr.count("peak") == 4
    assert "change 3" in first.stdout
    assert "optimizer" in first.stdout
    assert "▲" in first.stdout
    again = memprof(tmp_path, "history", "--commits", "main~5..main", "--json", "train.py")
    assert again.stderr.count("peak") == 1
    found = json.loads(again.stdout)
    assert [one["subject"] for one in found["commits"]] == [f"change {number}" for number in range(1, 6)]
    (change,) = found["changes"]
    assert change["head"] > change["base"]
    memprof(tmp_path, "history", "--html", "memory.html", "--show", "optimizer_state")
    page = (tmp_path / "memory.html").read_text()
    assert "<script" not in page
    assert 'class="changed"' in page
    known = memprof(
        tmp_path, "history", "--bisect", "main~4..main", "--json", "-o", "memory-history.jsonl", "--", "train.py"
    )
    assert json.loads(known.stdout)["runs"] == 0
    real = memprof(tmp_path, "record", "-q", "--stop", "-o", "run.memprof", "train.py")
    assert real.returncode == 0
    assert "train.py" in memprof(tmp_path, "history", "--add", "run.memprof").stdout


def test_wrong_requests_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """No job, no repository, commits in the wrong order, unknown devices and gates: a sentence and code 2."""
    plant(tmp_path, 2, {}, count=3)
    for words, expected in (
        (("history", "--bisect", "main~2..main"), "no job to run"),
        (("history", "--bisect", "main..main", "--", "train.py"), "no commit after main"),
        (("history", "--bisect", "main..main~1", "--", "train.py"), "main is not an ancestor of main~1"),
        (("history", "--bisect", "main~2..main", "--device", "rtx490", "--", "train.py"), "rtx490"),
        (("history", "--bisect", "main~2..main", "--fail-on", "speed>1", "--", "train.py"), "speed"),
        (("history",), "has no measurements yet"),
        (("history", "--commits", "main", "train.py"), "write A..B"),
        (("history", "--add", "x.memprof", "train.py"), "give one of them"),
    ):
        assert expected in memprof(tmp_path, *words, status=2).stderr
