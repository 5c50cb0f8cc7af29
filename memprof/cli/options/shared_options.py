"""The options that several verbs share, how they open a recording, and the gates and commits that they judge by."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.options.command_classes import option
from memprof.errors import UsageError
from memprof.launch.parent.settings import read_gates

if TYPE_CHECKING:
    from memprof.analysis.diff.gates import Gate
    from memprof.launch.commit_runs import CommitRuns
    from memprof.launch.repository import Repository
    from memprof.trace.store import Trace

F = TypeVar("F", bound=Callable[..., Any])


def job_arguments(command: F) -> F:
    """Adds the job to run: a script with its arguments, a module, or a command after ``--``."""
    words = click.argument(
        "words", nargs=-1, type=click.UNPROCESSED, metavar="{SCRIPT | -m MODULE} [ARGS]... | -- COMMAND..."
    )
    module = option("-m", "is_module", group="Job", is_flag=True, help="The job is a Python module, as in python -m.")
    return module(words(command))


def json_option(command: F) -> F:
    """Adds ``--json`` to a command with grouped options; it takes ``is_json``."""
    words = "Print everything as JSON: bytes, microseconds, stable keys."
    return option("--json", "is_json", group="Output", is_flag=True, help=words)(command)


def force_option(command: F) -> F:
    """Adds ``-f`` to a command with grouped options that writes one file; it takes ``force``."""
    return option("-f", "--force", group="Output", is_flag=True, help="Replace the file if it exists.")(command)


def output_option(words: str) -> Callable[[F], F]:
    """Returns a decorator that adds ``-o FILE``; the command takes ``output``."""
    file = click.Path(path_type=Path)
    return option("-o", "--output", group="Output", type=file, metavar="FILE", help=words)


def write_option(words: str) -> Callable[[F], F]:
    """Returns a decorator that adds ``--write FILE``, for a plan; the command takes ``written``."""
    file = click.Path(path_type=Path)
    return option("--write", "written", group="Output", type=file, metavar="FILE", help=words)


def no_run_option(command: F) -> F:
    """Adds ``--no-run``, for verbs that dry-run a job that this user recorded here; the command takes ``no_run``."""
    words = "Do not dry-run the job, even if you recorded it here."
    return option("--no-run", group="Dry runs", is_flag=True, help=words)(command)


def also_option(group: str) -> Callable[[F], F]:
    """Returns a decorator that adds ``--also TRACE``, for recordings at other sizes; the command takes ``also``."""
    words = "A recording of the same job at another size; may be repeated."
    return option("--also", group=group, multiple=True, type=click.Path(), metavar="TRACE", help=words)


def categories_option(command: F) -> F:
    """Adds ``--categories FILE``, patterns of the user's own categories; the command takes ``categories``."""
    file = click.Path(path_type=Path, dir_okay=False)
    words = "Name memory by these patterns over the frames that allocated it: [categories], 'regex' = \"name\"."
    return option("--categories", group="Tables", type=file, metavar="FILE.toml", help=words)(command)


def window_options(*, has_variables: bool = False) -> Callable[[F], F]:
    """Returns a decorator that adds ``--skip`` and ``--steps``; the command takes ``skip`` and ``steps``.

    Args:
        has_variables: Whether ``MEMPROF_SKIP`` and ``MEMPROF_STEPS`` set them too.
    """

    def add(command: F) -> F:
        for name, least, usual, words in (("steps", 1, 3, "Steps to record."), ("skip", 0, 2, "Steps to skip first.")):
            command = option(
                f"--{name}",
                group="Recorded steps",
                type=click.IntRange(min=least),
                default=usual,
                show_default=True,
                envvar=f"MEMPROF_{name.upper()}" if has_variables else None,
                metavar="N",
                help=words,
            )(command)
        return command

    return add


def open_trace(path: str, rank: int | None = None, *, is_scrubbed: bool) -> Trace:
    """Opens a recording.

    Args:
        path: The recording.
        rank: The rank to read; None for the first.
        is_scrubbed: Leave out the job's arguments and the identity of its owner.

    Raises:
        BadInputError: The recording cannot be opened.
        UsageError: The recording has no such rank.
    """
    from memprof.trace.store import Trace

    opened = Trace.open(path, rank)
    if not is_scrubbed:
        return opened
    from memprof.analysis.export.scrub import own_names, scrubbed

    return scrubbed(opened, names=own_names())


HISTORY_FILE = "memory-history.jsonl"


def chosen_gates(fail_on: tuple[str, ...], warn_on: tuple[str, ...]) -> tuple[list[Gate], list[Gate]]:
    """Returns the gates that fail and those that warn: from the flags, else from the project.

    Raises:
        UsageError: A gate is invalid; the message names where it is defined.
    """
    from memprof.analysis.diff.gates import parse_gate

    if fail_on or warn_on:
        return [parse_gate(text) for text in fail_on], [parse_gate(text) for text in warn_on]
    path, texts = read_gates(Path.cwd())
    try:
        return [parse_gate(text) for text in texts["fail"]], [parse_gate(text) for text in texts["warn"]]
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def job_words(words: Sequence[str], verb: str) -> tuple[str, ...]:
    """Returns the job's words, without the dashes that may precede them.

    Raises:
        UsageError: There are none.
    """
    job = tuple(words[1:] if words[:1] == ("--",) else words)
    if not job or job == ("-m",):
        raise UsageError(f"no job to run: end the command with it, memprof {verb} ... -- train.py")
    return job


@contextmanager
def open_runs(
    repository: Repository, words: Sequence[str], device: str, links: Sequence[Path], history: Path | None
) -> Iterator[CommitRuns]:
    """Makes a worktree of the repository around the current folder, in which a job is dry-run.

    Args:
        repository: The repository.
        words: The job.
        device: The device to simulate; "" for the CPU.
        links: What is linked into each checkout.
        history: File of what is known, to which new measurements are added; None for none.

    Raises:
        UsageError: The device is unknown, or a link is missing.
    """
    from memprof.launch.commit_runs import CommitRuns
    from memprof.launch.parent.settings import read_dry_window
    from memprof.machines.card import find_card

    if device:
        find_card(device)
    script = Path(words[0])
    if script.is_absolute() and script.is_relative_to(repository.root):
        # The commit's own file, not that of the working tree.
        words = [os.path.relpath(script, Path.cwd().resolve()), *words[1:]]
    with repository.worktree(links) as worktree:
        yield CommitRuns(worktree, words, read_dry_window(Path.cwd()), device, history=history)


def say(text: str) -> None:
    """Prints a line of progress on stderr."""
    from memprof.harmless import harmless

    print(harmless(text), file=sys.stderr, flush=True)
