"""Parsing a job's command line, and checking that it can be started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memprof.errors import UsageError
from memprof.launch.parent.target import NotExecutableError, NotFoundError, find_target


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def test_script_runs_under_this_python() -> None:
    """A script's arguments reach the child unchanged, after this interpreter."""
    target = find_target(("train.py", "-o", "--", "x y"), is_module=False, is_command=False)
    assert target.arguments == (sys.executable, "train.py", "-o", "--", "x y")
    assert target.stem == "train"


def test_module_runs_under_this_python() -> None:
    """So do a module's."""
    target = find_target(("pkg.train", "-m"), is_module=True, is_command=False)
    assert target.arguments == (sys.executable, "-m", "pkg.train", "-m")
    assert target.stem == "pkg.train"


@pytest.mark.parametrize(
    ("words", "stem"),
    [
        (("sh", "-c", "true"), "sh"),
        (("sh", "torchrun", "--nproc", "2", "src/train.py", "other.py"), "train"),
        (("sh", "python", "-m", "pkg.train", "x.py"), "pkg.train"),
        (("sh", "-m"), "sh"),
    ],
)
def test_command_is_named_after_its_script(words: tuple[str, ...], stem: str) -> None:
    """A command runs as it is, and lends its recording the name of the script in it."""
    target = find_target(words, is_module=False, is_command=True)
    assert target.arguments == words
    assert target.stem == stem


def test_folder_and_archive_are_scripts(folder: Path) -> None:
    """Python runs a folder with a __main__.py; whether there is one is Python's to say."""
    assert find_target((str(folder),), is_module=False, is_command=False).arguments[1] == str(folder)


def test_program_on_standard_input() -> None:
    """A single dash is not a file: Python reads the program from stdin, and the recording is named accordingly."""
    target = find_target(("-", "one"), is_module=False, is_command=False)
    assert target.arguments == (sys.executable, "-", "one")
    assert target.stem == "stdin"


def test_missing_script_is_not_found() -> None:
    """Exit code 127, before anything runs."""
    with pytest.raises(NotFoundError, match=r"no script absent\.py") as error:
        find_target(("absent.py",), is_module=False, is_command=False)
    assert error.value.exit_code == 127
    with pytest.raises(NotFoundError, match="Not a directory"):
        find_target(("train.py/x.py",), is_module=False, is_command=False)


@pytest.mark.parametrize("command", ["no-such-command", "./no-such-command", "/no/such/command", ""])
def test_missing_command_is_not_found(command: str) -> None:
    """Exit code 127 for a command that is neither on PATH nor a path."""
    with pytest.raises(NotFoundError):
        find_target((command,), is_module=False, is_command=True)


@pytest.mark.parametrize("command", ["./train.py", "/"])
def test_file_that_is_no_program(command: str) -> None:
    """Exit code 126 for a file without the permission, and for a folder."""
    with pytest.raises(NotExecutableError) as error:
        find_target((command,), is_module=False, is_command=True)
    assert error.value.exit_code == 126


def test_nothing_to_record() -> None:
    """Exit code 2, with an example."""
    with pytest.raises(UsageError, match=r"memprof record train\.py"):
        find_target((), is_module=False, is_command=False)
    with pytest.raises(UsageError, match="give one of them"):
        find_target(("x",), is_module=True, is_command=True)
