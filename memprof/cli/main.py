"""The `memprof` command: finds the verb, runs it, and turns every error into a message and an exit code."""

from __future__ import annotations

import difflib
import importlib
import keyword
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from memprof.errors import MemprofError
from memprof.harmless import notify
from memprof.version import __version__

#: Verb, and its line in ``memprof --help``. The command is ``memprof.cli.verbs.<verb>.<verb>`` (with underscores for
#: hyphens, and a trailing one for a Python keyword), or that of ``verbs.plans``, imported only when it runs:
#: ``memprof --help`` and shell completion stay fast.
VERBS = {
    "record": "Run a training job unchanged and record its memory.",
    "import": "Convert a memory snapshot or a profiler trace to a recording.",
    "attach": "Look into a training job that is running.",
    "report": "Show where the memory of a recorded job goes.",
    "dashboard": "Show recordings in a browser.",
    "suggest": "Suggest the fastest plans that make a recorded job fit a budget.",
    "largest": "Find the largest batch or sequence that fits a budget.",
    "data": "Find the batch of a job's data that peaks highest, without training.",
    "devices": "Find how many devices a recorded job needs.",
    "fit": "Find a plan that is measured to make a job fit a budget.",
    "estimate": "Estimate the memory of training a model from published formulas.",
    "predict": "Predict a plan's effect on a recorded job's memory and time.",
    "emit": "Write a plan as PyTorch code, or for another trainer.",
    "verify": "Compare a plan's prediction with a run under it.",
    "diff": "Compare the memory of two recordings, or of one with a budget.",
    "history": "Follow a job's memory over commits, or find the one that raised it.",
    "export": "Write a recording in another tool's format, or as a small baseline.",
    "mcp": "Serve these verbs as tools to an agent.",
    "schema": "Print the JSON Schema of a verb's --json output.",
    "demo": "Record a small job, and make it fit in half of its memory.",
    "doctor": "Check that recording works here and suggest fixes.",
    "completion": "Print the shell completion script.",
}

#: The verbs that ``memprof --help`` describes; ``memprof help --all`` describes the others, too.
_FIRST = ("record", "import", "report", "dashboard", "suggest", "fit", "diff", "demo")
#: The verbs in ``memprof.cli.verbs.plans``.
_PLANS = ("suggest", "largest", "data", "devices", "fit", "predict", "emit", "verify")

#: What to type for a former verb. Each runs for one release, and `_words_today` returns the words that it runs.
FORMER = {
    "summary": "export --to summary",
    "check": "diff",
    "planners": "suggest --compare-planners",
    "bisect": "history --bisect GOOD..BAD",
    "compare-allocations": "diff --allocations",
}
#: Their options that take no value, and those that have another name now.
_FLAGS = ("--json", "--row", "--dashboard", "-h", "--help")
_RENAMED = {"--row": "--format=markdown", "--top": "--rows", "--history": "--file"}

#: Options that other tools have for what ours do.
_OURS = {"--format": "--json", "--output": "-o", "--memory": "--budget", "--gpu": "--device"}
#: Whether the help describes every verb, in the metadata of a context.
_SHOWS_ALL = "memprof.shows_all"
_FAILED = 1
_INTERRUPTED = 130  # 128 + SIGINT, the shell convention


class LazyVerbs(click.Group):
    """A group that imports a command only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the verbs in the order of typical use."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a verb's command."""
        if cmd_name == "help":
            return show_help
        if cmd_name not in VERBS:
            return None
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name.replace("-", "_")
        folder = "memprof.cli.verbs.plans" if cmd_name in _PLANS else "memprof.cli.verbs"
        command = getattr(importlib.import_module(f"{folder}.{name}"), name)
        assert isinstance(command, click.Command)
        if "_MEMPROF_COMPLETE" in os.environ:  # a completion request from the shell
            from memprof.cli.completing import offer_values

            offer_values(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the verb; for an unknown one, suggests the nearest match."""
        if args and args[0] in FORMER:
            if not ctx.resilient_parsing:  # completion
                notify(f"{args[0]} is now memprof {FORMER[args[0]]}; the old name is deprecated")
            args = _words_today(args[0], args[1:])
        # click looks for near matches in this table, which it would otherwise fill by importing every command.
        self.commands = dict.fromkeys(VERBS, self)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the verbs without importing any: those that most jobs need, the others by name."""
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, VERBS[verb]) for verb in (VERBS if shows_all else _FIRST)])
        if not shows_all:
            with formatter.section("More verbs, described by memprof help --all"):
                names = ", ".join(verb for verb in VERBS if verb not in _FIRST)
                for line in textwrap.wrap(names, formatter.width - formatter.current_indent, break_on_hyphens=False):
                    formatter.write_text(line)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parses the options before the verb, and prints the help if requested."""
        with _enough_read():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> object:
        """Runs the verb."""
        with _enough_read():
            return super().invoke(ctx)


def _words_today(former: str, rest: list[str]) -> list[str]:
    """Returns the words that do what a former verb did."""
    verb, *more = FORMER[former].split()
    if former == "summary":
        return [verb, *more, *(word for word in rest if word != "--json")]  # the only format
    if former in ("check", "planners"):
        return [verb, *more, *rest]
    end = 0  # of the options, which the job's own follow
    while rest[end:] and rest[end].startswith("-") and rest[end] != "--":
        end += 1 if rest[end] in _FLAGS or "=" in rest[end] else 2
    parts = (word.partition("=") for word in rest[:end])
    options, words = ["".join((_RENAMED.get(name, name), *value)) for name, *value in parts], rest[end:]
    if former == "bisect":
        return [verb, *options, "--bisect", "..".join(words[:2]), *words[2:]]
    return [verb, *more, *options, "--", *words]


@contextmanager
def _enough_read() -> Iterator[None]:
    """Exits quietly when the reader of the output closes the pipe (``| head``)."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None in a process without stdout
                sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(0) from None


@click.group(
    cls=LazyVerbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    subcommand_metavar="VERB ...",
    epilog="Start with: memprof record train.py, or memprof demo",
)
@click.version_option(__version__, prog_name="memprof", message="%(prog)s %(version)s")
def memprof() -> None:
    """Shows what fills the memory of a PyTorch training job."""


@click.command("help")
@click.argument("verb", required=False)
@click.option("--all", "shows_all", is_flag=True, help="Describe every verb.")
@click.pass_context
def show_help(ctx: click.Context, verb: str | None, shows_all: bool) -> None:
    """Shows the help of memprof, or of a verb."""
    top = ctx.find_root()
    top.meta[_SHOWS_ALL] = shows_all
    if verb is None:
        click.echo(top.get_help())
        return
    name, command, _ = memprof.resolve_command(top, [verb])
    assert command is not None  # an unknown verb is an error
    click.echo(command.get_help(click.Context(command, info_name=name, parent=top)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: Words after ``memprof``; None for ``sys.argv``.
    """
    _tolerate_narrow_encodings()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = memprof.main(args=words, prog_name="memprof", standalone_mode=False, obj=words)
    except click.ClickException as error:
        _show(_with_hint(error))
        return error.exit_code
    except click.Abort:
        return _INTERRUPTED
    except MemprofError as error:
        _print_traceback_if_asked()
        notify(str(error))
        return error.exit_code
    except OSError as error:
        _print_traceback_if_asked()
        notify(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return _FAILED
    except Exception as error:  # noqa: BLE001 - the one place where an unexpected error becomes an exit code
        _print_traceback_if_asked()
        notify(
            f"internal error: {type(error).__name__}: {error}. This is a fault of memprof, not of your job; "
            "MEMPROF_DEBUG=1 shows where it is."
        )
        return _FAILED
    return status if isinstance(status, int) else 0


def _show(error: click.ClickException) -> None:
    """Prints an error of the command line: its usage, and the message as all others are."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if ctx is not None:
        click.echo(f"{ctx.get_usage()}\nTry '{ctx.command_path} {ctx.help_option_names[0]}' for help.\n", err=True)
    message = error.format_message()
    notify(message if message[:2].isupper() else message[:1].lower() + message[1:])


def _with_hint(error: click.ClickException) -> click.ClickException:
    """Returns an error with what was probably meant: the nearest value of an option, or our name for another tool's."""
    if isinstance(error, click.NoSuchOption) and error.option_name in _OURS:
        return click.UsageError(f"{error.message} Did you mean {_OURS[error.option_name]!r}?", error.ctx)
    given = re.match(r"'([^']*)' is not one of", error.message)
    if isinstance(error, click.BadParameter) and error.param is not None and given:
        kind = error.param.type
        near = difflib.get_close_matches(given[1], kind.choices, n=1) if isinstance(kind, click.Choice) else []
        if near:
            return click.BadParameter(f"{error.message} Did you mean {near[0]!r}?", error.ctx, error.param)
    return error


def _tolerate_narrow_encodings() -> None:
    """Makes stdout and stderr print ``?`` for characters that their encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a stream substituted by a test or an embedder may lack it
            stream.reconfigure(errors="replace")


def _print_traceback_if_asked() -> None:
    if os.environ.get("MEMPROF_DEBUG", "") not in ("", "0"):
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
