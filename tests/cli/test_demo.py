"""`memprof demo`: a job that ships with memprof is recorded, planned for and verified."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memprof.cli.main import main


def test_nothing_of_the_user_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder or a file of that name ends it before anything runs, and the sentence says what to do."""
    monkeypatch.chdir(tmp_path)
    Path("memprof-demo").mkdir()
    Path("mine").write_text("mine")
    for words in ([], ["-o", "mine"]):
        assert main(["demo", *words]) == 2
        assert "exists already, and nothing was changed: choose another folder with -o" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["memprof-demo", "mine"]


@pytest.mark.slow
def test_the_demo_fits_in_half_of_its_memory(tmp_path: Path) -> None:
    """It ends with 0, leaves the script, two recordings and the plan, and says what to type next."""
    done = subprocess.run(
        [sys.executable, "-m", "memprof", "demo", "-o", "first"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == [
        "fits.memprof",
        "plan.toml",
        "run.memprof",
        "train.py",
    ]
    assert "within the budget, measured: " in done.stdout
    assert "next: memprof dashboard first/run.memprof first/fits.memprof" in done.stdout
