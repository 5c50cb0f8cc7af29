"""Manual pages of the command and its verbs, from click's help texts: python -m memprof.cli.manual FOLDER."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from memprof.cli.main import VERBS, memprof
from memprof.cli.options.command_classes import option_groups
from memprof.version import __version__

#: Exit codes, common to all verbs except those that run a job, whose descriptions list their own.
_EXIT_CODES = (
    ("0", "Success."),
    ("1", "Internal error, or a file system error."),
    ("2", "Invalid option or argument."),
    ("3", "Inconclusive: the input does not determine the answer."),
    ("4", "A limit is exceeded, or nothing fits the budget."),
    ("5", "A file is missing, damaged, not memprof's, or from a newer memprof."),
)
_RUN_JOBS = ("record", "fit")
#: Characters that roff would replace with others unless escaped by name.
_SIGNS = {"-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}


def manual_pages() -> dict[str, str]:
    """Returns the pages by file name: ``memprof.1``, and ``memprof-report.1`` for each verb."""
    top = click.Context(memprof, info_name="memprof", **memprof.context_settings)
    pages = {"memprof.1": _top_page(top)}
    for verb, summary in VERBS.items():
        command = memprof.get_command(top, verb)
        assert command is not None
        context = click.Context(command, info_name=verb, parent=top)
        variables = [
            (param.envvar, f"Stands for {param.opts[-1]}.")
            for param in command.params
            if isinstance(param, click.Option) and isinstance(param.envvar, str)
        ]
        examples = [line.strip() for line in (command.epilog or "").splitlines() if line.startswith("  ")]
        pages[f"memprof-{verb}.1"] = "\n".join(
            [
                *_head(f"memprof-{verb}", summary.rstrip(".")),
                *_synopsis(f"memprof {verb}", command, context),
                ".SH DESCRIPTION",
                *_prose(inspect.cleandoc(command.help or "")),
                ".SH OPTIONS",
                *_options(command, context),
                *([".SH ENVIRONMENT", *_terms(variables)] if variables else []),
                *([] if verb in _RUN_JOBS else [".SH EXIT STATUS", *_terms(_EXIT_CODES)]),
                *([".SH EXAMPLES", ".nf", *map(_escaped, examples), ".fi"] if examples else []),
                ".SH SEE ALSO",
                "memprof(1)",
                "",
            ]
        )
    return pages


def write_pages(folder: Path) -> list[Path]:
    """Writes every page into a folder, creating it if needed, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in manual_pages().items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _top_page(context: click.Context) -> str:
    verbs = [(f"memprof-{verb}(1)", summary) for verb, summary in VERBS.items()]
    help_text = inspect.cleandoc(memprof.help or "")
    return "\n".join(
        [
            *_head("memprof", help_text.split(".")[0]),
            *_synopsis("memprof", memprof, context),
            ".SH DESCRIPTION",
            *_prose(help_text),
            ".SH VERBS",
            *_terms(verbs),
            ".SH OPTIONS",
            *_options(memprof, context),
            ".SH EXIT STATUS",
            *_terms(_EXIT_CODES),
            ".SH ENVIRONMENT",
            *_terms([("MEMPROF_DEBUG", "Print the traceback of an error as well."), ("NO_COLOR", "Print no colours.")]),
            ".SH SEE ALSO",
            _escaped(", ".join(name for name, _ in verbs)),
            "",
        ]
    )


def _head(name: str, what: str) -> Iterator[str]:
    yield f'.TH {name.upper()} 1 "" "memprof {__version__}" "memprof manual"'
    yield ".SH NAME"
    yield f"{_escaped(name)} \\- {_escaped(what)}"


def _synopsis(name: str, command: click.Command, context: click.Context) -> Iterator[str]:
    yield ".SH SYNOPSIS"
    yield f".B {_escaped(name)}"
    yield _escaped(" ".join(command.collect_usage_pieces(context)))


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    """Formats the options, below their groups' headings if there is more than one group."""
    groups = option_groups(command, context)
    for heading, options in groups:
        if len(groups) > 1:
            yield f".SS {_escaped(heading)}"
        yield from _terms([record for one in options if (record := one.get_help_record(context)) is not None])


def _prose(text: str) -> Iterator[str]:
    """Formats paragraphs, separated by empty lines."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        yield ".PP"
        yield _escaped(" ".join(paragraph.split()))


def _terms(terms: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> Iterator[str]:
    for term, meaning in terms:
        yield ".TP"
        yield f"\\fB{_escaped(term)}\\fR"
        yield _escaped(" ".join(meaning.split()))


def _escaped(text: str) -> str:
    """Returns a text escaped for roff: nothing in it is a request, and dashes stay typeable ASCII."""
    safe = text.replace("\\", "\\e")
    for sign, name in _SIGNS.items():
        safe = safe.replace(sign, name)
    return f"\\&{safe}" if safe.startswith(".") else safe


if __name__ == "__main__":
    for written in write_pages(Path(sys.argv[1])):
        print(written)
