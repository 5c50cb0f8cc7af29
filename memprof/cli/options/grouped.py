"""Options in groups: the help of a verb with many options lists them under headings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

#: Headings of ``--help`` beside grouped options, and of all options of a command without groups.
OTHER = "Other options"
ALL = "Options"


class GroupedOption(click.Option):
    """An option that is listed under a heading.

    Attributes:
        group: The heading.
    """

    def __init__(self, *args: Any, group: str, **settings: Any) -> None:
        """Stores the heading; the rest is click's."""
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


def option_groups(command: click.Command, ctx: click.Context) -> list[tuple[str, list[click.Option]]]:
    """Returns the visible options of any command by heading, in the order of help; ``--help`` is in the last group."""
    is_grouped = isinstance(command, GroupedCommand)
    groups: dict[str, list[click.Option]] = {}
    for one in command.get_params(ctx):
        if isinstance(one, click.Option) and not one.hidden:
            heading = one.group if isinstance(one, GroupedOption) else OTHER
            groups.setdefault(heading if is_grouped else ALL, []).append(one)
    return list(groups.items())
