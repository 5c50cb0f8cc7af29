"""One page for each verb, read off its command line: usage, options, variables, examples that are really run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from docs.building.commands import commands_of
from memprof.cli.main import VERBS, memprof
from memprof.cli.options.command_classes import option_groups

#: The page that explains what a verb is for, where it is not ``<verb>.md``.
GUIDES = {
    "data": "suggest.md",
    "largest": "suggest.md",
    "devices": "sharding.md",
    "predict": "policies.md",
    "verify": "policies.md",
    "mcp": "agents.md",
    "schema": "agents.md",
}

#: Verbs that answer until they are interrupted: their examples are shown and not run.
ENDLESS = ("dashboard",)

#: Verbs whose examples take minutes.
SLOW = ("largest", "demo")

#: Verbs whose output is of the machine that built the site, and says where things lie on it.
TELLS_MACHINE = ("doctor",)

#: Verbs that need a repository of commits, or a client.
NEEDS_MORE = ("history", "mcp")

#: Which of a verb's examples is run on its page, by its place; the first where it is not here.
SHOWN = {"fit": 1, "suggest": 1}

#: Lines of an example's output that a page shows.
MOST_LINES = 32


def command_of(verb: str) -> click.Command:
    """Returns a verb's command."""
    command = memprof.get_command(click.Context(memprof), verb)
    assert command is not None, f"memprof lists {verb!r} and has none"
    return command


def help_of(verb: str) -> str:
    """Returns what ``memprof VERB -h`` prints."""
    command = command_of(verb)
    return command.get_help(_context(verb, command))


def examples_of(verb: str) -> list[str]:
    """Returns the examples that a verb's help ends with."""
    lines = inspect.cleandoc((command_of(verb).epilog or "").replace("\b", "")).splitlines()
    return [line.strip() for line in lines if line.startswith("  ")]


def option_names(verb: str) -> set[str]:
    """Returns every way to write each option of a verb, ``--help`` included."""
    command = command_of(verb)
    return {
        name
        for parameter in command.get_params(_context(verb, command))
        if isinstance(parameter, click.Option) and not parameter.hidden
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def guide_of(verb: str, pages: set[str]) -> str:
    """Returns the page that explains a verb; "" where there is none."""
    guide = GUIDES.get(verb, f"{verb}.md")
    return guide if guide in pages else ""


def index_page() -> str:
    """Writes the page that lists the verbs."""
    rows = [f"| [`memprof {verb}`]({verb}.md) | {line} |" for verb, line in VERBS.items()]
    return "\n".join(
        [
            "# The verbs",
            "",
            "`memprof VERB -h` prints what each of these pages is made of. Every verb ends with an",
            "[exit code](../exit-codes.md) that says what came of it.",
            "",
            "| verb | |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def verb_page(verb: str, pages: set[str], exit_codes: str = "") -> str:
    """Writes the page of a verb.

    Args:
        verb: The verb.
        pages: The pages of the site, for the link to its guide.
        exit_codes: Rows of the guide's table of exit codes, where it has one.
    """
    command = command_of(verb)
    context = _context(verb, command)
    guide = guide_of(verb, pages)
    lines = [f"# memprof {verb}", "", VERBS[verb], ""]
    if guide:
        lines += [
            f"Explained in [{guide.removesuffix('.md')}](../{guide}). This page is what the program itself says.",
            "",
        ]
    lines += ["## Usage", "", "```text", _usage(command, context), "```", "", *_paragraphs(command), ""]
    lines += ["## Options", "", *_options(command, context)]
    examples = examples_of(verb)
    if examples:
        lines += ["## Examples", "", "```bash", *examples, "```", ""]
        shown = examples[SHOWN.get(verb, 0)]
        if verb not in (*ENDLESS, *SLOW, *TELLS_MACHINE, *NEEDS_MORE) and commands_of(f"```\n{shown}\n```", verb):
            lines += ["One of them, run when this page was built:", "", "```console", f"$ {shown}", "```", ""]
    lines += ["## Exit codes", ""]
    if exit_codes:
        lines += [exit_codes, "", "Those that all verbs share: [exit codes](../exit-codes.md).", ""]
    else:
        lines += ["Those that all verbs share: [exit codes](../exit-codes.md).", ""]
    return "\n".join(lines)


def exit_code_table(markdown: str) -> str:
    """Returns the table of exit codes of a guide, its links as from a folder below; "" where it has none."""
    found = re.search(r"^\| exit code \|.*\n\|[-|: ]+\n(\|.*\n)+", markdown, re.MULTILINE)
    return re.sub(r"\]\((?=[\w-]+\.md)", "](../", found[0].strip()) if found else ""


def _context(verb: str, command: click.Command) -> click.Context:
    # With its settings: a command keeps the help option of the first context it is shown in.
    parent = click.Context(memprof, info_name="memprof", **memprof.context_settings)
    return click.Context(command, info_name=verb, parent=parent, max_content_width=100, terminal_width=100)


def _usage(command: click.Command, context: click.Context) -> str:
    return command.get_usage(context).removeprefix("Usage: ")


def _paragraphs(command: click.Command) -> Iterator[str]:
    """Yields the help text; click's own marks are taken out, and its lines joined by the reader's browser."""
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    yield re.sub(r"(?<![`\w-])(--[a-z][\w-]*)", r"`\1`", text)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yields a table of options for each of their groups, below its heading if there is more than one."""
    groups = option_groups(command, context)
    for heading, options in groups:
        if len(groups) > 1:
            yield from (f"### {heading}", "")
        yield from (*_option_table(options, context), "")


def _option_table(options: list[click.Option], context: click.Context) -> Iterator[str]:
    has_variables = any(option.envvar for option in options)
    yield "| option | variable | meaning |" if has_variables else "| option | meaning |"
    yield "|---|---|---|" if has_variables else "|---|---|"
    for option in options:
        record = option.get_help_record(context)
        assert record is not None, option.name
        variables = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
        variable = f" {', '.join(f'`{name}`' for name in variables)} |" if has_variables else ""
        meaning = " ".join(record[1].split()).replace("|", "\\|").replace("<", "&lt;")
        yield f"| `{record[0]}` |{variable} {meaning} |"
