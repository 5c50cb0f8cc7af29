"""The commands that memprof proposes: it accepts every one of them."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from memprof.cli.main import VERBS, main, memprof
from memprof.trace.manifest import Manifest
from memprof.trace.store import write_trace
from tests.cli.test_report import model_tables

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces"

_COMMAND = re.compile(rf"memprof ({'|'.join(VERBS)})\b((?: +(?:-|\{{|\[)?[^\s`,;()]+)*)")
#: Programs that start a job: `memprof record` takes them for a script unless `--` stands before them.
_LAUNCHERS = ("torchrun", "accelerate", "mpirun", "srun", "python", "deepspeed")

#: Commands whose pages propose others, run in a folder with run.memprof, other.memprof and ranks.memprof.
PAGES = (
    "report run.memprof",
    "report run.memprof --by module",
    "report run.memprof --allocator",
    "report run.memprof --static",
    "report ranks.memprof",
    "report ranks.memprof --by rank",
    "suggest run.memprof --budget 60% --allow checkpoint",
    "suggest run.memprof --budget 60% --allow checkpoint --write plan.toml",
    "suggest run.memprof --budget 1MiB --allow checkpoint",
    "suggest run.memprof --budget 60% --at-batch 20 --allow checkpoint",
    "predict run.memprof --checkpoint layers.*",
    "predict run.memprof --checkpoint layers.* --write plan.toml",
    "devices run.memprof --budget 60%",
    "devices run.memprof --budget 95%",
    "devices run.memprof --budget 95% --write plan.toml",
    "largest run.memprof --budget 90% --allow checkpoint --time-limit 2",
    "diff run.memprof --budget 1MiB",
    "diff run.memprof run.memprof",
    "estimate gpt2 --batch 2 --machine rtx3090",
    "estimate --transformer layers=4,width=128,heads=4,vocab=25,positions=128,tied=no --from run.memprof",
)


def parser_of(verb: str) -> tuple[click.Command, click.Context]:
    top = click.Context(memprof, info_name="memprof", **memprof.context_settings)
    command = memprof.get_command(top, verb)
    assert command is not None
    return command, top


def parse(command: str) -> None:
    """Parses a command line as memprof does; an unknown verb or option, or a missing argument, is an error."""
    words = shlex.split(command)
    assert words[0] == "memprof"
    assert words[1] in VERBS, command
    parser, top = parser_of(words[1])
    parser.make_context(words[1], words[2:], parent=top)
    if words[1] in ("record", "fit"):
        _check_job(words[2:])


def _check_job(words: list[str]) -> None:
    assert not {*words[: words.index("--") if "--" in words else None]} & {*_LAUNCHERS}, words


@pytest.mark.parametrize("words", PAGES)
def test_commands_on_pages_can_be_typed(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every line that begins with `next:` holds a command that is parsed without an error."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLES / "gpt" / "run.memprof", "run.memprof")
    write_trace("ranks.memprof", [(Manifest(rank=rank, world_size=2), model_tables(2 + rank)) for rank in range(2)])
    assert main(words.split()) in (0, 3, 4)
    lines = [line.removeprefix("next: ") for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    assert lines
    for line in lines:
        if line.startswith("memprof "):
            parse(re.split(r"  |  ?\(| and the job's own ", line)[0])


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the string literals of a file but docstrings; what an f-string fills in is `§`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield node.lineno, "".join(str(one.value) if isinstance(one, ast.Constant) else "§" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def _wrong(verb: str, rest: str) -> str:
    """Returns what is wrong with the words after a verb, as far as a sentence shows; "" for nothing."""
    parser, top = parser_of(verb)
    context = click.Context(parser, info_name=verb, parent=top)
    known = {
        name
        for one in parser.get_params(context)
        if isinstance(one, click.Option)
        for name in (*one.opts, *one.secondary_opts)
    }
    for word in rest.split():
        if word in ("--", "|", ">") or word.endswith(".py"):
            break
        if verb in ("record", "fit") and word in _LAUNCHERS:
            return f"{word} is taken for a script: write memprof {verb} -- {word}"
        name = re.split("[=§]", word.strip("[]'\".:"))[0]
        if re.fullmatch(r"--?[a-z][\w-]*", name) and name not in known:
            return f"memprof {verb} has no {name}"
    return ""


def test_commands_in_sentences_exist() -> None:
    """Wherever a text of the sources has `memprof VERB --option`, the verb has that option, and runs what follows."""
    wrong = []
    for path in [*(ROOT / "memprof").rglob("*.py"), *(ROOT / "dashboard").rglob("*.py")]:
        for line, text in _texts(path):
            for verb, rest in _COMMAND.findall(text):
                if sentence := _wrong(verb, rest):
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {sentence}")
    assert wrong == []


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("report run.memprof --by modul", "Did you mean 'module'?"),
        ("report run.memprof --format json", "Did you mean '--json'?"),
        ("suggest run.memprof --budget rtx4090", "'rtx4090' is a device, not a size: give --machine 'rtx4090'"),
    ],
)
def test_what_was_probably_meant_is_said(
    command: str, hint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of an option with a letter missing, another tool's option, and a device where a size belongs."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLES / "gpt" / "run.memprof", "run.memprof")
    assert main(shlex.split(command)) == 2
    assert hint in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("record -o run.memprof torchrun x.py", "memprof record -o run.memprof -- torchrun x.py"),
        ("record sh -c 'exit 3'", "memprof record -- sh -c 'exit 3'"),
        ("fit --budget 1GiB accelerate launch x.py", "memprof fit --budget 1GiB -- accelerate launch x.py"),
    ],
)
def test_a_command_without_dashes_is_explained(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher in the place of a script, installed here or not: the command to type has all that was typed."""
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(typed)) == 127
    said = capsys.readouterr().err
    assert said.endswith(f"put two dashes before a command, {hint}\n")
    parse(hint)


_STRICT = "import argparse; argparse.ArgumentParser().parse_args()"


@pytest.mark.parametrize(
    ("script", "typed", "status", "hint"),
    [
        (_STRICT, "train.py --steps 5 x", 2, "memprof record -q -f --steps 5 train.py x"),
        (_STRICT, "train.py --lr 5", 2, ""),
        (_STRICT, "-- python train.py --steps 5", 2, ""),
        ("", "train.py --lr 1 -o run.memprof", 3, "memprof record -q -f -o run.memprof train.py --lr 1"),
        ("", "train.py --steps 5", 3, ""),
    ],
)
def test_an_option_of_ours_behind_the_script_is_pointed_out(
    script: str, typed: str, status: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the script rejects it, or the value is a file of memprof's; other options are the script's own."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "memprof", "record", "-q", "-f", *shlex.split(typed)], capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    said = [line for line in done.stderr.splitlines() if "if it is meant for memprof: " in line]
    assert [line.partition("if it is meant for memprof: ")[2] for line in said] == ([hint] if hint else [])
