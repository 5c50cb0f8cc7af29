"""The GPU harness: every section runs on a CPU too, and its results can be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.gpu.machine import ROOT
from lab.gpu.running import SHARES, environment
from lab.gpu.section import MODULES
from memprof.policies.plan.plan_file import read_plan
from memprof.trace.store import Trace

RECORDING = ("exact", "replay", "samples", "pytest", "dry")
PLANNING = ("policies", "suggest", "overhead", "swap")


def harness(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lab.gpu", *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True
    )


def rehearse(folder: Path, *names: str) -> dict[str, Any]:
    only = [word for name in names for word in ("--only", name)]
    done = harness("--device", "cpu", "--out", str(folder), "--minutes", "9", *only)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / "results.json").read_text())
    assert results["passed"] == dict.fromkeys(names, True)
    for section in results["sections"]:
        assert section["status"] == "ok"
        assert section["rows"], section["name"]
        assert len(section["rows"]) == len(section["figures"])
        assert all(len(row) == len(section["columns"]) for row in section["rows"])
    return {section["name"]: section for section in results["sections"]}


def test_every_section_is_rehearsed() -> None:
    """The two tests below run all sections there are."""
    assert sorted(SHARES) == sorted(MODULES) == sorted(RECORDING + PLANNING)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_what_is_recorded(tmp_path: Path) -> None:
    """A rehearsal on a processor records exactly, replays, makes a sample that opens, and says what it ran on."""
    sections = rehearse(tmp_path, *RECORDING)
    assert all(row["difference_bytes"] == {"allocated_bytes": 0} for row in sections["exact"]["figures"])
    assert [row["differ"] for row in sections["replay"]["figures"]] == [0, 0]
    (compared,) = (row["compared"] for row in sections["dry"]["figures"])
    assert compared["equal_in_order"] == compared["real"]["allocations"] > 500
    sample = tmp_path / "samples" / "gpt-cuda"
    assert {path.name for path in sample.iterdir()} >= {"train.py", "run.memprof", "expected.json", "command.txt"}
    assert Trace.open(sample / "run.memprof").recorded_steps
    page = (tmp_path / "results.md").read_text()
    assert f"torch {torch.__version__}" in page.split("###")[0]
    assert "these are no measurements" in page


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_what_is_planned(tmp_path: Path) -> None:
    """A rehearsal writes each prediction before the run, which meets it, and reports what refused a plan and why."""
    sections = rehearse(tmp_path, *PLANNING)
    policies = {row["plan"]: row for row in sections["policies"]["figures"]}
    assert policies["checkpoint"]["error"]["allocated_bytes"] == 0
    assert "already in host memory" in policies["swap"]["refused"]
    assert policies["checkpoint"]["written_unix_s"] < policies["checkpoint"]["ran_unix_s"]
    assert read_plan(tmp_path / "predictions" / "gpt-checkpoint.toml").prediction is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_and_fails_nothing(tmp_path: Path) -> None:
    """On a machine without a GPU the command is skipped with a reason, writes nothing, and ends with 0."""
    done = harness("--out", str(tmp_path / "results"))
    assert done.returncode == 0
    assert "skipped: torch finds no CUDA device" in done.stdout
    assert not (tmp_path / "results").exists()
