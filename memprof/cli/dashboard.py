"""`memprof dashboard`: recordings in a browser. The page is a package of its own, which needs dash."""

from __future__ import annotations

import importlib
import importlib.util

import click

from memprof.errors import UsageError


def _command() -> click.Command:
    """Returns the dashboard's command; one that says how to install it where it is not."""
    if importlib.util.find_spec("dash") is None:
        raise UsageError("The dashboard needs dash and plotly: pip install 'torch-memprof[dashboard]'")
    command = importlib.import_module("memprof_dashboard.command").dashboard
    assert isinstance(command, click.Command)
    return command


def __getattr__(name: str) -> click.Command:
    """Finds the verb's command when it is asked for, so that nothing else imports dash."""
    if name == "dashboard":
        return _command()
    raise AttributeError(name)
