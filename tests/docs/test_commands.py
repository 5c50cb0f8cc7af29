"""The documentation's commands: each is run, or parsed with a documented reason why it is not run."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import click
import pytest

from docs.building import verbs
from docs.building.commands import ROOT, Command, commands_of, inline_commands, name_of, page_commands, pages
from docs.building.workshop import Workshop, environment, reads, run
from memprof.cli.main import VERBS, memprof

#: Commands that are parsed and not run, by a part of them, and why.
NOT_RUN = {
    "s3://": "needs an address to write to",
    "accelerate launch": "needs accelerate, and two GPUs",
    "mpirun": "needs MPI",
    "srun": "needs Slurm",
    "ranks/": "needs a folder of ranks",
    "--compare-planners": "takes ten minutes: every planner at seven budgets",
    "memprof history": "needs a repository; tests/cli/test_bisect.py makes one",
    "memprof mcp": "needs a client; tests/integrations/test_mcp.py is one",
    "compiled.memprof": "compiles the model, which takes minutes; tests/policies/compile does",
    "--compile": "compiles the model, which takes minutes; tests/policies/compile does",
    "--nproc-per-node 8": "needs eight devices",
    "l8.memprof": "a dry run of a model of 8 billion parameters takes minutes",
    "llama.py": "a dry run of a model of 8 billion parameters takes minutes",
    "lora8b": "needs peft, and minutes for a dry run of a model of 8 billion parameters",
    "gpt2": "needs transformers, and minutes for a dry run of GPT-2 medium",
    "sft.py": "needs trl",
    "--expert-load 1.5": "needs a mixture of experts; tests/virtual/test_dry_ranks.py runs one",
    "4711": "needs a job that is running; tests/launch/test_attach.py starts one",
    "--ranks 64": "needs a distributed script; stages.py is one, on four ranks",
}

#: Commands that end with another status than 0 on the job they are run on, by their words.
ENDS_WITH = {
    # The card is full in the middle of the first step: the status is the job's own.
    "memprof record --dry-run --device rtx4090 --strict -o oom.memprof sample_traces/gpt/train.py --layers 32 "
    "--width 1280 --heads 20 --length 1024 --batch-size 8": 1,
    # Most of the job's peak is activations, which are not divided: 4 is the answer for that.
    "memprof devices run.memprof --budget 60% --write plan.toml": 4,
}

#: Files that commands of every test run read; a command that reads others, or starts a job, is slow.
SHARED = {"run.memprof", "head.memprof", "base.memprof", "plan.toml", "memory.json", "base.json", "snapshot.pickle"}

#: Commands that run in every test run, though they start a job or search for plans.
QUICK = (
    "memprof record train.py --epochs 1",
    "memprof suggest run.memprof --budget 8GiB",
    "memprof record --plan plan.toml -o head.memprof train.py --your --arguments",
)


def _help_commands() -> list[Command]:
    """The examples in the help of each verb."""
    found = []
    for verb in VERBS:
        text = "\n".join(["```", *verbs.examples_of(verb), "```"])
        found += commands_of(text, f"memprof {verb} -h")
    return found


def _once(commands: list[Command]) -> Iterator[Command]:
    """Leaves out what was shown before, whatever it was called for."""
    seen = set()
    for command in commands:
        key = (command.words, command.before, tuple(sorted(command.variables.items())))
        if key not in seen:
            seen.add(key)
            yield command


def _reason(command: Command) -> str:
    return next((reason for part, reason in NOT_RUN.items() if part in f"{command.text} "), "")


def _is_slow(command: Command) -> bool:
    if command.text in QUICK:
        return False
    return (
        command.place.startswith("docs/faq.md")  # its output is compared, too, in test_console.py
        or command.verb in ("record", "fit", "dashboard", "demo", "doctor", "suggest", "largest")
        or "--check" in command.words
        or bool(set(reads(command.words)) - SHARED)
    )


SHOWN = list(_once([*page_commands(), *_help_commands()]))
WHOLE = [command for command in SHOWN if not command.is_synopsis]
RUN = [
    pytest.param(
        command,
        id=command.text,
        marks=[pytest.mark.slow] if _is_slow(command) else [],
    )
    for command in WHOLE
    if not _reason(command)
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.mark.parametrize("command", RUN)
def test_what_the_documentation_says_to_type_runs(command: Command, workshop: Workshop) -> None:
    """A command line of README.md, of a page or of a verb's help ends well on a small job of the kind it is for."""
    folder = workshop.bench([command.words])
    words = [match for word in command.words for match in _matches(word, folder)]
    if command.verb in verbs.ENDLESS or "--dashboard" in command.words:
        _interrupted_when_it_answers(["memprof", *words], folder)
        return
    outcome = run(["memprof", *words], folder, dict(command.variables))
    expected = ENDS_WITH.get(command.text, 0)
    assert outcome.status == expected, f"{command.place}: {command.text}\n{outcome.output}\n{outcome.errors}"
    assert outcome.output.strip() or outcome.errors.strip() or "-o" in words


def _matches(word: str, folder: Path) -> list[str]:
    """What a shell makes of a word: the files that match its pattern, or the word itself."""
    matches = sorted(path.name for path in folder.glob(word)) if word.endswith(".*.memprof") else []
    return matches or [word]


def _interrupted_when_it_answers(words: list[str], folder: Path) -> None:
    """Starts a command that serves, waits for its address, and ends it with Ctrl-C."""
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(words, cwd=folder, env=environment(folder), stdout=said, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 60
            while "http://" not in (folder / "said").read_text() and process.poll() is None:
                assert time.monotonic() < deadline, (folder / "said").read_text()
                time.sleep(0.05)
            address = re.search(r"http://(127\.0\.0\.1):(\d+)", (folder / "said").read_text())
            assert address is not None, (folder / "said").read_text()
            _wait_until_it_listens(address[1], int(address[2]))
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0, (folder / "said").read_text()
        finally:
            process.kill()
            process.wait()


def _wait_until_it_listens(host: str, port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with closing(HTTPConnection(host, port, timeout=10)) as connection:
                connection.request("GET", "/")
                connection.getresponse()
                return
        except OSError:
            assert time.monotonic() < deadline, f"nothing answers at {host}:{port}"
            time.sleep(0.05)


@pytest.mark.parametrize("command", WHOLE, ids=lambda command: command.text)
def test_what_the_documentation_says_to_type_can_be_parsed(command: Command) -> None:
    """Every whole command line is one that the program's own parser takes, run here or not."""
    parser = verbs.command_of(command.verb)
    parent = click.Context(memprof, **memprof.context_settings)
    parser.make_context(command.verb, list(command.words[1:]), parent=parent)


def test_synopses_and_text_name_options_that_exist() -> None:
    """Wherever `memprof VERB --option` is written, in synopses, in running text or in a table, the verb has it."""
    shown = [command for command in page_commands() if command.is_synopsis]
    shown += [command for page in pages() for command in inline_commands(page.read_text(), name_of(page))]
    wrong = []
    for command in shown:
        if command.verb and command.verb not in VERBS:
            wrong.append(f"{command.place}: memprof has no verb {command.verb}")
            continue
        for word in _own_words(command):
            name = word.partition("=")[0].rstrip(",.;)")
            if re.fullmatch(r"--?[a-z][\w-]*", name) and command.verb and name not in verbs.option_names(command.verb):
                wrong.append(f"{command.place}: memprof {command.verb} has no {name}")
    assert not wrong, "\n".join(wrong)


def _own_words(command: Command) -> list[str]:
    """The words up to the job that record and fit run."""
    words = re.sub(r"[\[\]|']", " ", " ".join(command.words)).split()
    if command.verb in ("record", "fit", "history"):
        for end, word in enumerate(words):
            if word == "--" or word.endswith(".py"):
                return words[:end]
    return words


def test_every_reason_is_needed() -> None:
    """The table of what is not run names no command that is gone."""
    texts = [f"{command.text} " for command in WHOLE]
    assert [part for part in NOT_RUN if not any(part in text for text in texts)] == []
    assert [text for text in (*QUICK, *ENDS_WITH) if text not in {command.text for command in WHOLE}] == []


def test_make_targets_that_are_named_exist() -> None:
    """Every `make target` in a page and in README.md is one of the Makefile's."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*pages(), ROOT / "CONTRIBUTING.md"]:
        named = re.findall(r"(?:`|^ {4}|^)make (?:[A-Z_]+=\S+ )*([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
        assert set(named) <= targets, page
