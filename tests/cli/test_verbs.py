"""The registry of verbs: a verb is a module and a line of `VERBS`."""

from __future__ import annotations

import sys
from pathlib import Path
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


@pytest.mark.parametrize(
    ("former", "today"),
    [
        ("summary run.memprof -o memory.json --json", "export --to summary run.memprof -o memory.json"),
        ("check run.memprof --budget 1GiB --json", "diff run.memprof --budget 1GiB --json"),
        ("planners run.memprof --time-limit 5", "suggest run.memprof --compare-planners --time-limit 5"),
        (
            "bisect --json --fail-on peak>+2% --history h.jsonl v1 HEAD -- train.py --lr 1",
            "history --json --fail-on peak>+2% -o h.jsonl --bisect v1..HEAD -- train.py --lr 1",
        ),
        (
            "compare-allocations --row --device a100-80g gpu.pickle -- train.py --json",
            "diff --allocations --format markdown --device a100-80g -- gpu.pickle -- train.py --json",
        ),
        ("compare-allocations --top=3 gpu.pickle dry.pickle", "diff --allocations --rows 3 gpu.pickle dry.pickle"),
    ],
)
def test_a_former_verb_is_parsed_as_what_it_is_now(former: str, today: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With one line on stderr that says what to type; completion offers none of them, and prints no such line."""
    context = click.Context(cli.memprof, **cli.memprof.context_settings)

    def params(line: str) -> tuple[str | None, dict[str, object]]:
        name, command, words = cli.memprof.resolve_command(context, line.split())
        assert command is not None
        return name, command.make_context(name, words, parent=context).params

    verb = former.split(maxsplit=1)[0]
    assert params(former) == params(today)
    said = capsys.readouterr().err
    assert said == f"memprof: {verb} is now memprof {cli.FORMER[verb]}; the old name is deprecated\n"
    assert verb not in cli.VERBS


def test_former_verbs_are_hidden_and_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit codes and JSON are those of the verb that replaces them."""
    assert completed("memprof che", monkeypatch, capsys) == [""]
    monkeypatch.delenv(VARIABLE)
    monkeypatch.chdir(tmp_path)
    recording = str(Path(__file__).parents[2] / "sample_traces" / "lstm" / "run.memprof")
    outputs = []
    for verb in ("check", "diff"):
        assert cli.main([verb, recording, "--budget", "1KiB", "--json"]) == 4
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert cli.main(["schema", "check"]) == cli.main(["schema", "diff-check"]) == 0
