"""The options of the verbs that judge: gates, and the commits at which a job is dry-run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.options.command_classes import device_option
from memprof.errors import UsageError
from memprof.launch.parent.settings import read_gates

if TYPE_CHECKING:
    from memprof.analysis.diff.gates import Gate
    from memprof.launch.commit_runs import CommitRuns
    from memprof.launch.repository import Repository

F = TypeVar("F", bound=Callable[..., Any])
HISTORY_FILE = "memory-history.jsonl"


def gate_options(command: F) -> F:
    """Adds ``--fail-on`` and ``--warn-on`` to a command."""
    fail = click.option(
        "--fail-on", multiple=True, metavar="GATE", help="Fail if this is exceeded: peak>+2%, phase:backward>+64MiB."
    )
    warn = click.option("--warn-on", multiple=True, metavar="GATE", help="Warn if this is exceeded.")
    return fail(warn(command))


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


def commit_options(command: F) -> F:
    """Adds ``--device`` and ``--link`` to a command; it takes ``device`` and ``links``."""
    device = device_option("device", "The GPU to simulate, such as rtx4090.  [default: the CPU]", default="")
    link = click.option(
        "--link",
        "links",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="A file or folder that is not committed, such as data, to link into each checkout; may be repeated.",
    )
    return device(link(command))


def job_words(words: Sequence[str], verb: str) -> tuple[str, ...]:
    """Returns the job's words, without the dashes that may precede them.

    Raises:
        UsageError: There are none.
    """
    job = tuple(words[1:] if words[:1] == ("--",) else words)
    if not job or job == ("-m",):
        raise UsageError(f"There is no job to run: end the command with it, memprof {verb} ... -- train.py")
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
