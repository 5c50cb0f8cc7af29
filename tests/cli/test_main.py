"""The `memprof` command itself: help and its groups, the registry of verbs, errors, exit codes, pipes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from memprof.cli import main as cli
from memprof.cli import main as command_line
from memprof.cli.completing import VARIABLE
from memprof.cli.main import VERBS, memprof
from memprof.cli.manual import manual_pages
from memprof.cli.options.command_classes import GroupedCommand, GroupedOption, option_groups
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


#: Verbs with more options than this list them in groups.
MOST_UNGROUPED = 10


def command_of(verb: str) -> tuple[click.Command, click.Context]:
    top = click.Context(memprof, info_name="memprof", **memprof.context_settings)
    command = memprof.get_command(top, verb)
    assert command is not None
    return command, click.Context(command, info_name=verb, parent=top)


def sections_of(text: str) -> dict[str, list[str]]:
    """Returns the options that a help text lists, as they are typed, by heading."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z][a-z ]+:", line):
            heading = line.removesuffix(":")
        elif heading and re.match(r"  -", line):
            found.setdefault(heading, []).append(line.split("  ")[1].strip())
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_long_help_is_in_one_group(verb: str) -> None:
    """No option of such a verb is without a group, and the help lists each of them once."""
    command, context = command_of(verb)
    own = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    if len(own) <= MOST_UNGROUPED:
        return
    assert isinstance(command, GroupedCommand)
    assert [one.opts for one in own if not isinstance(one, GroupedOption)] == []
    groups = option_groups(command, context)
    assert [heading for heading, _ in groups][-1] == "Other options"
    listed = [one for _, options in groups for one in options]
    assert sorted(map(id, listed)) == sorted(map(id, [*own, command.get_help_option(context)]))
    sections = sections_of(command.get_help(context))
    assert list(sections) == [heading for heading, _ in groups]
    assert [len(names) for names in sections.values()] == [len(options) for _, options in groups]


def test_groups_of_record_and_suggest() -> None:
    """What belongs together stands together."""
    sections = sections_of(command_of("record")[0].get_help(command_of("record")[1]))
    assert list(sections) == [
        "Output",
        "Recorded steps",
        "Dry run",
        "Budget",
        "Plan and policies",
        "Job",
        "Other options",
    ]
    assert sections["Dry run"] == [
        "--dry-run / --no-dry-run",
        "--whole",
        "--device NAME",
        "--strict",
        "--ranks N",
        "--nodes N",
        "--expert-load X",
        "--values-from FILE",
    ]
    assert sections["Plan and policies"][0] == "--plan FILE"
    sections = sections_of(command_of("suggest")[0].get_help(command_of("suggest")[1]))
    assert sections["Budget and device"] == ["--budget SIZE", "--device NAME"]
