"""The commands that memprof proposes: it accepts every one of them."""

from __future__ import annotations

import ast
import contextlib
import io
import pickle
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
from tests.analysis.test_snapshot_plans import training
from tests.cli.test_report import model_tables
from tests.scripts import net_of_blocks

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces"

_COMMAND = re.compile(rf"memprof ({'|'.join(VERBS)})\b((?: +(?:-|\{{|\[)?[^\s`,;()]+)*)")
#: Programs that start a job: `memprof record` takes them for a script unless `--` stands before them.
_LAUNCHERS = ("torchrun", "accelerate", "mpirun", "srun", "python", "deepspeed")

#: A job that trains in steps of a size, of which a device has memory for some.
_JOB = (
    net_of_blocks(4)
    + """
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(int((*sys.argv, 2048)[1]), 64, device=device)).square().mean().backward()
    optimizer.step()
"""
)
_SMALL, _BIG = "train.py 2048", "train.py 2400000"
_DRY = "record --quiet --device t4 -o"

#: What is run before a command, in the same folder, and the command whose lines are followed.
STATES = (
    ("report run.memprof",),
    ("report run.memprof --by module",),
    ("report run.memprof --allocator",),
    ("report run.memprof --static",),
    ("report ranks.memprof",),
    ("report ranks.memprof --by rank",),
    ("suggest run.memprof --budget 80% --no-run --allow checkpoint",),
    ("suggest run.memprof --budget 80% --no-run --allow checkpoint --write plan.toml",),
    ("suggest run.memprof --budget=80% --check --allow checkpoint",),
    ("suggest run.memprof --budget 64KiB --no-run --allow checkpoint",),
    ("suggest run.memprof --budget 64KiB --device t4 --no-run --allow checkpoint",),
    ("suggest run.memprof --budget 80% --at-batch 4096 --no-run --allow checkpoint",),
    ("predict run.memprof --checkpoint layers.* --no-run",),
    ("predict run.memprof --checkpoint layers.* --no-run --write plan.toml",),
    ("predict run.memprof --checkpoint layers.* --no-run --budget 8MiB",),
    ("devices run.memprof --budget 99%",),
    ("devices run.memprof --budget 8MiB",),
    ("largest run.memprof --budget 90% --allow checkpoint --no-run --time-limit 2",),
    ("largest run.memprof --budget 90% --allow checkpoint --no-run --time-limit 2 --write plan.toml",),
    ("diff run.memprof --budget 8MiB",),
    ("diff run.memprof --fail-on peak>8MiB",),
    ("export run.memprof --to summary -o base.json", "diff base.json --budget 8MiB"),
    ("export run.memprof --to summary -o base.json", "diff base.json run.memprof"),
    ("export run.memprof --to summary -o base.json", "diff run.memprof base.json"),
    ("diff run.memprof run.memprof",),
    ("estimate gpt2 --batch 2 --device rtx3090",),
    ("estimate gpt2 --batch 2 --device mi300x",),
    ("estimate --mlp 64,256,64 --from run.memprof --batch 2048",),
    ("import gpu.pickle -o gpu.memprof",),
    ("import gpu.pickle -o gpu.memprof", "suggest gpu.memprof --budget 1KiB"),
    (f"record -o new.memprof {_SMALL}",),
    (f"record --device t4 -o big.memprof {_BIG}",),
    (f"{_DRY} big.memprof {_BIG}", "suggest big.memprof --device t4 --allow checkpoint --no-run"),
    (f"record --device t4 --strict -o oom.memprof {_BIG}",),
    (f"{_DRY} oom.memprof --strict {_BIG}", "report oom.memprof"),
    (f"{_DRY} oom.memprof --strict {_BIG}", "suggest oom.memprof --device t4"),
    (f"record --budget 8MiB -o new.memprof {_SMALL}",),
    (
        "suggest run.memprof --budget 80% --no-run --allow checkpoint --write plan.toml",
        f"record --plan plan.toml --budget 8MiB -o head.memprof {_SMALL}",
    ),
    (f"fit --budget 90% --allow checkpoint -o fitted {_SMALL}",),
    (f"fit --budget 64KiB --allow checkpoint -o fitted {_SMALL}",),
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


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the job, a recording of it, one of two ranks, and a snapshot of a GPU."""
    folder = tmp_path_factory.mktemp("states")
    (folder / "train.py").write_text(_JOB)
    assert run(folder, f"record --quiet --stop -o run.memprof {_SMALL}")[0] == 0
    write_trace(
        folder / "ranks.memprof",
        [
            (Manifest(rank=rank, world_size=2, command=("python", "train.py")), model_tables(2 + rank))
            for rank in (0, 1)
        ],
    )
    (folder / "gpu.pickle").write_bytes(pickle.dumps(training()))
    return folder


def run(folder: Path, words: str) -> tuple[int, str]:
    """Runs memprof; a job in a process of its own."""
    if words.split(maxsplit=1)[0] in ("record", "fit"):
        done = subprocess.run(
            [sys.executable, "-m", "memprof", *shlex.split(words)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout + done.stderr
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(shlex.split(words))
    return status, said.getvalue()


@pytest.mark.parametrize("state", STATES, ids=" && ".join)
def test_each_next_line_does_what_it_says(state: tuple[str, ...], recordings: Path, tmp_path: Path) -> None:
    """In the state that it is printed in, in order: it ends well, and the files that it names are there."""
    shutil.copytree(recordings, tmp_path, dirs_exist_ok=True)
    *before, words = state
    for each in before:
        assert run(tmp_path, each)[0] in (0, 1), each
    status, said = run(tmp_path, words)
    assert status in (0, 1, 3, 4), said
    lines = re.findall(r"^(?:memprof: )?(?:wrote .*; )?(?:next|then): (.*)$", said, re.MULTILINE)
    assert lines or words.endswith(("base.json", "base.json --budget 8MiB")), said
    for line in lines:
        command = line.partition("  ")[0]
        assert command.startswith("memprof "), line
        assert not {"N", "SIZE", "NAME", "..."} & {*command.split()}, line
        parse(command)
        if command.startswith(("memprof dashboard ", "memprof record --shard ")):
            continue  # goes on until it is ended, and takes several processes
        ended, printed = run(tmp_path, command.removeprefix("memprof "))
        # Nothing fits a budget of a few KiB, whichever command is asked.
        assert ended == 0 or (ended == 4 and "64KiB" in words), f"{command}: {printed}"
        for option in ("--write", "-o"):
            if ended == 0 and option in command.split():
                assert (tmp_path / shlex.split(command)[shlex.split(command).index(option) + 1]).exists()


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the string literals of a file but docstrings; what an f-string fills in is `§`."""
    source = path.read_text(encoding="utf-8")
    if "memprof " not in source:
        return  # nothing in it is a command
    tree = ast.parse(source)
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
        ("suggest run.memprof --budget rtx4090", "'rtx4090' is a device, not a size: give --device 'rtx4090'"),
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
