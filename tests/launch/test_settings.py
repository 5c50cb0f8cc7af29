"""Settings in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.errors import UsageError
from memprof.launch.parent.settings import DryWindow, read_dry_window, read_project_settings


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_nearest_file_counts(tmp_path: Path) -> None:
    """The search goes upwards and ends at the first pyproject.toml, also where that one says nothing."""
    write(tmp_path, "[tool.memprof]\nskip = 7\n")
    below = tmp_path / "project" / "scripts"
    below.mkdir(parents=True)
    assert read_project_settings(below) == {"skip": 7}
    write(tmp_path / "project", "[project]\nname = 'x'\n")
    assert read_project_settings(below) == {}


def test_every_key_is_read(tmp_path: Path) -> None:
    """All options can be set; a relative output counts from the file's own folder."""
    write(
        tmp_path,
        "[tool.memprof]\noutput='runs/a.memprof'\nforce=true\nquiet=true\nskip=0\nsteps=1\nstop=true\ndry_run=true\nplan='p.toml'\n",
    )
    assert read_project_settings(tmp_path) == {
        "output": str(tmp_path / "runs/a.memprof"),
        "force": True,
        "quiet": True,
        "skip": 0,
        "steps": 1,
        "stop": True,
        "dry_run": True,
        "plan": str(tmp_path / "p.toml"),
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stepz = 3", "has no key stepz. Did you mean steps?"),
        (
            "colour = 'red'",
            "has no key colour. The keys are output, force, quiet, skip, steps, stop, light, dry_run, whole, device",
        ),
        ("steps = 'three'", "steps in [tool.memprof] must be a whole number, not 'three'"),
        ("steps = true", "steps in [tool.memprof] must be a whole number, not True"),
        ("force = 1", "force in [tool.memprof] must be true or false, not 1"),
        ("output = 3", "output in [tool.memprof] must be a text, not 3"),
        ("steps = 0", "steps in [tool.memprof] must be 1 or more, not 0"),
        ("skip = -1", "skip in [tool.memprof] must be 0 or more, not -1"),
        ("dry_run = 1", "dry_run in [tool.memprof] must be true or false, not 1"),
        ("dry_run = {step = 3}", "[tool.memprof.dry_run] has no key step. Did you mean steps?"),
        ("dry_run = {steps = 0}", "steps in [tool.memprof.dry_run] must be 1 or more, not 0"),
        ("skip = = 1", "is not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    """An unknown key, a wrong type, a value out of range or broken TOML each get a message with the file's path."""
    write(tmp_path, f"[tool.memprof]\n{text}\n")
    with pytest.raises(UsageError) as error:
        read_project_settings(tmp_path)
    assert sentence in str(error.value)
    assert str(tmp_path / "pyproject.toml") in str(error.value)


def test_steps_of_dry_runs_have_a_table_of_their_own(tmp_path: Path) -> None:
    """It chooses their window and makes no run dry; what it leaves out stays as it is without."""
    assert read_dry_window(tmp_path) == DryWindow(skip=1, steps=2)
    write(tmp_path, "[tool.memprof]\nsteps = 9\n[tool.memprof.dry_run]\nskip = 4\nisolate = false\n")
    assert read_dry_window(tmp_path) == DryWindow(skip=4, steps=2, isolate=False, is_chosen=True)
    assert read_project_settings(tmp_path) == {"steps": 9}


def test_not_a_table(tmp_path: Path) -> None:
    """``memprof = 3`` under [tool] is named too."""
    write(tmp_path, "[tool]\nmemprof = 3\n")
    with pytest.raises(UsageError, match="not a table"):
        read_project_settings(tmp_path)


def test_broken_file_of_others_is_passed_over(tmp_path: Path) -> None:
    """A pyproject.toml that is broken and says nothing to memprof does not forbid recording."""
    write(tmp_path, "[project\n")
    assert read_project_settings(tmp_path) == {}
    write(tmp_path, "tool = 3\n")
    assert read_project_settings(tmp_path) == {}
    (tmp_path / "pyproject.toml").write_bytes(b"\xff\xfe")
    assert read_project_settings(tmp_path) == {}
