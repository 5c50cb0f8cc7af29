"""The command class of verbs that run a job: options end where the job begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memprof.cli.options.grouped import GroupedCommand
from memprof.launch.parent.settings import read_project_settings
from memprof.launch.parent.target import CannotStartError


class RecordCommand(GroupedCommand):
    """A command whose own options end where the job begins, with defaults from pyproject.toml."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Passes the project's settings to click as defaults, below flags and MEMPROF_* variables."""
        try:
            folder = Path.cwd()
        except FileNotFoundError:
            raise CannotStartError(
                "the current folder no longer exists: it was deleted or replaced. Change to another with cd."
            ) from None
        given = read_project_settings(folder)
        if "plan" in given:
            given["plan_path"] = given.pop("plan")
        extra.setdefault("default_map", given)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses memprof's options, and notes whether ``--`` precedes the job."""
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = len(ctx.params["words"])
        # Everything after the options is passed verbatim, so the job's words are the tail of the arguments.
        ctx.meta["is_command"] = given[len(given) - words - 1 : len(given) - words] == ["--"]
        return rest
