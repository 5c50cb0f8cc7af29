"""The `memprof` command itself: help, errors, exit codes, pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.cli import main as command_line
from memprof.errors import GateFailedError
from memprof.version import __version__


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memprof.cli.main", *words]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_describes_eight_verbs_and_names_the_others(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`memprof help --all` describes every one, `memprof help VERB` is the verb's own help."""
    assert command_line.main([flag]) == 0
    first = " ".join(capsys.readouterr().out.split())  # long lines are wrapped
    assert sum(f" {verb} {summary}" in first for verb, summary in command_line.VERBS.items()) == 8
    assert all(verb in first for verb in command_line.VERBS)
    assert command_line.main(["help", "--all"]) == 0
    whole = " ".join(capsys.readouterr().out.split())
    assert all(f" {verb} {summary}" in whole for verb, summary in command_line.VERBS.items())
    assert command_line.main(["help", "report"]) == 0
    assert capsys.readouterr().out.startswith("Usage: memprof report")
    assert command_line.main(["help", "reprot"]) == 2
    assert "report" in capsys.readouterr().err


@pytest.mark.parametrize("verb", command_line.VERBS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_verb_has_help_with_two_examples(verb: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`-h` works on every verb and shows how it is used."""
    assert command_line.main([verb, flag]) == 0
    assert capsys.readouterr().out.count(f"  memprof {verb} ") >= 2


def test_help_imports_nothing_that_is_slow() -> None:
    """Neither the verbs nor what they compute with: the help is there at once."""
    slow = {"numpy", "pandas", "pyarrow", "rich", "torch", "memprof.cli.verbs.record", "memprof.cli.verbs.report"}
    script = (
        "import sys; from memprof.cli.main import main; status = main(['--help']); "
        f"print(sorted({slow} & set(sys.modules)), file=sys.stderr); sys.exit(status)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "[]\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """One line: name and version."""
    assert command_line.main(["--version"]) == 0
    assert capsys.readouterr().out == f"memprof {__version__}\n"


def test_a_misspelt_verb_is_a_usage_error_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and the verb that was meant."""
    assert command_line.main(["reprot"]) == 2
    assert "report" in capsys.readouterr().err


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("memprof.trace.store.Trace.open", fail)
    return command_line.main(["report", "run.memprof"])


def test_an_error_is_one_sentence_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, without a traceback."""
    monkeypatch.delenv("MEMPROF_DEBUG", raising=False)
    assert fail_with(GateFailedError("The limit is exceeded."), monkeypatch) == 4
    assert capsys.readouterr() == ("", "memprof: The limit is exceeded.\n")


def test_an_internal_error_is_short_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1; the traceback only with MEMPROF_DEBUG=1."""
    monkeypatch.delenv("MEMPROF_DEBUG", raising=False)
    assert fail_with(KeyError("x"), monkeypatch) == 1
    short = capsys.readouterr().err
    assert "internal error: KeyError: 'x'" in short
    assert "Traceback" not in short
    monkeypatch.setenv("MEMPROF_DEBUG", "1")
    assert fail_with(KeyError("x"), monkeypatch) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_of_the_system_is_not_called_internal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk or a folder without permission is not reported as an internal error."""
    assert fail_with(PermissionError(13, "Permission denied", "run.memprof"), monkeypatch) == 1
    assert capsys.readouterr().err == "memprof: Permission denied: run.memprof\n"


def test_control_c_ends_as_shells_expect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """128 + SIGINT, and no traceback."""
    assert fail_with(KeyboardInterrupt(), monkeypatch) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", ["report {trace}", "report {trace} --json", "report -h", "--help"])
def test_a_closed_pipe_is_silent(small_file: Path, words: str) -> None:
    """`memprof ... | head` prints no traceback, and does not fail."""
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "memprof.cli.main", *words.format(trace=small_file).split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")
