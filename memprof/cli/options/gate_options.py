"""The gate options, and the gates in the project's pyproject.toml."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.errors import UsageError
from memprof.launch.parent.settings import read_gates

if TYPE_CHECKING:
    from memprof.analysis.diff.gates import Gate

F = TypeVar("F", bound=Callable[..., Any])


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
