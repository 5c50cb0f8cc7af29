"""The options that several verbs share, and how they open a recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.options.command_classes import option

if TYPE_CHECKING:
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
