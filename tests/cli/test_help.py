"""The help of verbs with many options: groups under headings."""

from __future__ import annotations

import re

import click
import pytest

from memprof.cli.main import VERBS, memprof
from memprof.cli.options.command_classes import GroupedCommand, GroupedOption, option_groups

#: Verbs with more options than this list them in groups.
MOST_UNGROUPED = 10


def command_of(verb: str) -> tuple[click.Command, click.Context]:
    top = click.Context(memprof, info_name="memprof", **memprof.context_settings)
    command = memprof.get_command(top, verb)
    assert command is not None
    return command, click.Context(command, info_name=verb, parent=top)


def sections_of(text: str) -> dict[str, list[str]]:
    """Returns the options that a help text lists, as they are typed, by heading."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z][a-z ]+:", line):
            heading = line.removesuffix(":")
        elif heading and re.match(r"  -", line):
            found.setdefault(heading, []).append(line.split("  ")[1].strip())
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_long_help_is_in_one_group(verb: str) -> None:
    """No option of such a verb is without a group, and the help lists each of them once."""
    command, context = command_of(verb)
    own = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    if len(own) <= MOST_UNGROUPED:
        return
    assert isinstance(command, GroupedCommand)
    assert [one.opts for one in own if not isinstance(one, GroupedOption)] == []
    groups = option_groups(command, context)
    assert [heading for heading, _ in groups][-1] == "Other options"
    listed = [one for _, options in groups for one in options]
    assert sorted(map(id, listed)) == sorted(map(id, [*own, command.get_help_option(context)]))
    sections = sections_of(command.get_help(context))
    assert list(sections) == [heading for heading, _ in groups]
    assert [len(names) for names in sections.values()] == [len(options) for _, options in groups]


def test_groups_of_record_and_suggest() -> None:
    """What belongs together stands together."""
    sections = sections_of(command_of("record")[0].get_help(command_of("record")[1]))
    assert list(sections) == [
        "Output",
        "Recorded steps",
        "Dry run",
        "Budget",
        "Plan and policies",
        "Job",
        "Other options",
    ]
    assert sections["Dry run"] == [
        "--dry-run / --no-dry-run",
        "--whole",
        "--device NAME",
        "--strict",
        "--ranks N",
        "--nodes N",
        "--expert-load X",
        "--values-from FILE",
    ]
    assert sections["Plan and policies"][0] == "--plan FILE"
    sections = sections_of(command_of("suggest")[0].get_help(command_of("suggest")[1]))
    assert sections["Budget and device"] == ["--budget SIZE", "--device NAME"]
