"""The registry of verbs: a verb is a module and a line of `VERBS`."""

from __future__ import annotations

import sys
from types import ModuleType

import click
import pytest

from memprof.cli import main as cli
from memprof.cli.completing import VARIABLE
from memprof.cli.manual import manual_pages


@click.command()
@click.argument("name")
@click.option("--loud", is_flag=True, help="Print it in capitals.")
def greet(name: str, loud: bool) -> int:
    """Greet somebody."""
    print(name.upper() if loud else name)
    return 3


@pytest.fixture
def greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb as a plug-in adds it: a module with a command of its name, and one line."""
    module = ModuleType("memprof.cli.verbs.greet")
    module.greet = greet  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.VERBS, "greet", "Greet somebody.")


def completed(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns what bash is offered for the last of some words."""
    monkeypatch.setenv(VARIABLE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with pytest.raises(SystemExit):
        cli.memprof.main(args=[], prog_name="memprof", complete_var=VARIABLE)
    return [line.partition(",")[2] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("greeting")
def test_a_verb_is_added_by_a_module_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs, and help, completion, the nearest match and the manual know it."""
    assert cli.main(["greet", "you", "--loud"]) == 3
    assert capsys.readouterr().out == "YOU\n"
    assert cli.main(["help", "--all"]) == 0
    assert " greet Greet somebody. " in " ".join(capsys.readouterr().out.split())
    assert cli.main(["gret", "you"]) == 2
    assert "greet" in capsys.readouterr().err
    pages = manual_pages()
    assert "\\fBmemprof\\-greet(1)\\fR" in pages["memprof.1"]
    assert "\\fB\\-\\-loud\\fR" in pages["memprof-greet.1"]
    assert completed("memprof gre", monkeypatch, capsys) == ["greet"]
    assert "--loud" in completed("memprof greet --", monkeypatch, capsys)
