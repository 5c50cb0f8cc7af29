"""Command classes: options listed in groups, and options that end where the job begins."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from memprof.errors import UsageError
from memprof.launch.parent.settings import read_project_settings
from memprof.launch.parent.target import CannotStartError, NotFoundError

F = TypeVar("F", bound=Callable[..., Any])
#: Headings of ``--help`` beside grouped options, and of all options of a command without groups.
OTHER = "Other options"
#: Programs that start a job, which may be missing here.
_LAUNCHERS = ("accelerate", "deepspeed", "mpirun", "srun", "torchrun")
ALL = "Options"


class GroupedOption(click.Option):
    """An option that is listed under a heading.

    Attributes:
        group: The heading.
    """

    def __init__(self, *args: Any, group: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help lists its options by group, groups in the order of their first option."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes each group under its heading."""
        for heading, options in option_groups(self, ctx):
            with formatter.section(heading):
                formatter.write_dl([record for one in options if (record := one.get_help_record(ctx)) is not None])


def option(*names: str, group: str, **settings: Any) -> Callable[[F], F]:
    """Adds an option to a group of a command's help; otherwise as ``click.option``.

    Args:
        names: The ways to write it, and optionally its parameter.
        group: Heading that it is listed under.
        settings: As in ``click.option``.
    """
    return click.option(*names, cls=GroupedOption, group=group, **settings)


class DeviceOption(GroupedOption):
    """``--device``, of which ``--machine`` is an old name: understood, and shown nowhere."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Makes the parser understand both."""
        self.opts.append("--machine")
        super().add_to_parser(parser, ctx)
        self.opts.pop()


def device_option(name: str, words: str, *, group: str = OTHER, **settings: Any) -> Callable[[F], F]:
    """Adds ``--device NAME``, a device of the catalogue, to a command.

    Args:
        name: The parameter that takes it.
        words: Its help text.
        group: Heading that it is listed under.
        settings: As in ``click.option``.
    """
    more = {"metavar": "NAME", "help": words, **settings}
    return click.option("--device", name, cls=DeviceOption, group=group, **more)


def add_all(*adders: Callable[[F], F]) -> Callable[[F], F]:
    """Returns a decorator that adds options, in the order in which help lists them."""

    def add(command: F) -> F:
        for one in reversed(adders):
            command = one(command)
        return command

    return add


def option_groups(command: click.Command, ctx: click.Context) -> list[tuple[str, list[click.Option]]]:
    """Returns the visible options of any command by heading, in the order of help; ``--help`` is in the last group."""
    is_grouped = isinstance(command, GroupedCommand)
    groups: dict[str, list[click.Option]] = {}
    for one in command.get_params(ctx):
        if isinstance(one, click.Option) and not one.hidden:
            heading = one.group if isinstance(one, GroupedOption) else OTHER
            groups.setdefault(heading if is_grouped else ALL, []).append(one)
    return list(groups.items())


def refuse_others(ctx: click.Context, names: Collection[str], sentence: Callable[[click.Option], str]) -> None:
    """Rejects options that were typed and belong to another use of a command.

    Args:
        ctx: The command line.
        names: Parameters of this use.
        sentence: Returns what to say of an option, behind its name.

    Raises:
        UsageError: There is one.
    """
    for one in ctx.command.params:
        is_typed = ctx.get_parameter_source(one.name or "") is ParameterSource.COMMANDLINE
        if is_typed and isinstance(one, click.Option) and one.name not in names:
            name = next((name for name in one.opts if name.startswith("--")), one.opts[0])
            raise UsageError(f"{name} {sentence(one)}.")


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
        """Parses memprof's options; notes whether ``--`` precedes the job, and the option of ours that follows it.

        Raises:
            NotFoundError: The job is a command without ``--``; the message has the command to type.
        """
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = list(ctx.params["words"])
        # Everything after the options is passed verbatim, so the job's words are the tail of the arguments.
        before = given[: len(given) - len(words)]
        ctx.meta["is_command"] = before[-1:] == ["--"]
        ctx.meta["misplaced"] = ("", False)
        if ctx.meta["is_command"] or not words or ctx.resilient_parsing:
            return rest
        start = ["memprof", ctx.info_name or "", *before]
        is_program = words[0] in _LAUNCHERS or shutil.which(words[0]) is not None
        if is_program and not ctx.params["is_module"] and not Path(words[0]).exists():
            raise NotFoundError(
                f"no script {words[0]} here: put two dashes before a command, {shlex.join([*start, '--', *words])}"
            )
        ctx.meta["misplaced"] = self._misplaced(start, words)
        return rest

    def _misplaced(self, start: list[str], words: list[str]) -> tuple[str, bool]:
        """Returns a sentence on the first option of ours behind a script, and whether it names a file of ours."""
        own = {name: one for one in self.params if isinstance(one, click.Option) for name in one.opts}
        for place, word in enumerate(words[1:], start=1):
            name, is_joined, _ = word.partition("=")
            if name in own and name not in start:
                end = place + (1 if is_joined or own[name].is_flag else 2)
                meant = shlex.join([*start, *words[place:end], *words[:place], *words[end:]])
                sentence = f"{name} behind {words[0]} goes to the script; if it is meant for memprof: {meant}"
                return sentence, any(one.endswith((".memprof", "plan.toml")) for one in words[place:end])
        return "", False
