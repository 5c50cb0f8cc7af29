"""The pytest plugin, in sessions of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest, torch

@pytest.mark.limit_gpu_memory("2 MiB")
def test_within():
    torch.ones(1000) + 1

@pytest.mark.limit_gpu_memory("2 MiB")
def test_above():
    twice = torch.ones(2**20) * 2

@pytest.mark.limit_gpu_memory("1 KiB")
def test_without_torch():
    pass

@pytest.mark.limit_gpu_memory("much")
def test_mistaken():
    pass

@pytest.mark.limit_gpu_memory("2 MiB")
def test_that_fails_itself():
    torch.ones(1)
    assert False, "my own"

def train(width):
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(8, width)).sum().backward()
    optimizer.step()

@pytest.mark.limit_gpu_memory_increase("2%", baseline="memory.json")
def test_growth():
    import os
    train(int(os.environ.get("WIDTH", "100")))

def test_fixture(memprof_recording):
    with memprof_recording() as recording:
        train(100)
    assert recording.peak_bytes >= 2 * 40_000  # weight and gradient
    assert recording.summary.peak.bytes == recording.peak_bytes
    with memprof_recording() as nothing:
        pass
    assert nothing.peak_bytes == 0

def test_unmarked():
    torch.ones(2**20)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "test_mine.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "WIDTH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def session(*words: str) -> tuple[dict[str, str], str]:
    """Runs pytest as a user does; returns what came of each test, and all that was printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:dash", "-rA", "test_mine.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    found = {test: outcome for outcome, test in re.findall(r"^(\w+) test_mine\.py::(\w+)", done.stdout, re.MULTILINE)}
    assert found, done.stdout + done.stderr
    return found, done.stdout


def test_tests_above_their_limit_fail_and_no_others() -> None:
    """Each for itself: a mistake in a marker or a failure of the test's own changes nothing for the rest."""
    found, out = session("--memprof")
    assert found == {
        "test_within": "PASSED",
        "test_above": "FAILED",
        "test_without_torch": "PASSED",
        "test_mistaken": "FAILED",
        "test_that_fails_itself": "FAILED",
        "test_growth": "FAILED",
        "test_fixture": "PASSED",
        "test_unmarked": "PASSED",
    }
    assert "memory: the test's peak is 8.00 MiB in aten.mul.Tensor at test_mine.py:10, 6.00 MiB above its limit" in out
    assert "'much' is not a size" in out
    assert "my own" in out
    assert "baseline" in out
    table = out.partition("peak memory (memprof)")[2]
    assert "8.00 MiB  test_mine.py::test_above" in table
    assert "0 B  test_mine.py::test_without_torch" in table
    assert "test_unmarked" not in table.partition("short test summary")[0]


@pytest.mark.slow
def test_baseline_is_written_and_held_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written where asked for, by one process of several; then more than that fails, and the file stays."""
    found, _ = session("--memprof-update", "-k", "growth or within", "-n", "2")
    assert found == {"test_growth": "PASSED", "test_within": "PASSED"}
    kept = json.loads(Path("memory.json").read_text())
    assert list(kept) == ["test_mine.py::test_growth"]
    assert kept["test_mine.py::test_growth"] >= 2 * 40_000
    monkeypatch.setenv("WIDTH", "200")
    found, out = session("-k", "growth")
    assert found == {"test_growth": "FAILED"}
    assert "more than the" in out
    assert json.loads(Path("memory.json").read_text()) == kept
