"""`memprof diff`: what changed between two recordings, and whether the gates hold; one alone against a budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.options.command_classes import GroupedCommand, device_option, option, refuse_others
from memprof.cli.options.shared_options import chosen_gates, json_option, output_option
from memprof.errors import UsageError
from memprof.harmless import notify

if TYPE_CHECKING:
    from memprof.analysis.diff.comparison import Diff

FORMATS = ("text", "markdown", "github", "json", "benchmark", "junit", "html")


def write_text(text: str, output: Path | None) -> None:
    """Writes a text atomically to a file, or to stdout if there is none.

    Raises:
        OutputError: The file cannot be written.
    """
    if output is None:
        print(text, end="")
        return
    from memprof.trace.files.whole_file import whole_file

    with whole_file(output) as file:
        file.write(text.encode())


def render(found: Diff, form: str, rows: int, *, explains: bool, names: tuple[str, str]) -> str:
    """Returns a diff as text in the given format."""
    if form == "json":
        from memprof.cli.pages.diff.diff_data import diff_to_json

        return json.dumps(diff_to_json(found, names), indent=2, allow_nan=False) + "\n"
    if form == "benchmark":
        from memprof.cli.pages.diff.diff_data import diff_to_benchmark

        return json.dumps(diff_to_benchmark(found), indent=2) + "\n"
    if form == "junit":
        from memprof.cli.pages.diff.diff_data import diff_to_junit

        return diff_to_junit(found)
    from memprof.cli.page import Page
    from memprof.cli.pages.diff.diff_page import fill_diff, to_github, to_html, to_markdown

    if form != "text":
        return {"markdown": to_markdown, "github": to_github, "html": to_html}[form](found, rows, names)
    page = Page.for_stdout()
    fill_diff(page, found, rows, explains=explains, names=names)
    return page.render()


_GATE = "Fail if this is exceeded, peak>40GiB; with a base also peak>+2%, phase:backward>+64MiB."
_GROUP = "Allocations"
_KINDS = ("category", "module", "op", "source", "storage", "file", "folder")
#: The options of each kind of comparison, by parameter, and those that all have.
_TWO = ("bases", "heads", "ignore", "explains", "output", "fail_on", "warn_on", "rows", "by")
_ONE = ("budget", "machine", "fail_on", "warn_on")
_ALL = ("form", "is_json")
_ALLOCATIONS = ("allocations", "machine", "tolerance", "figure", "in_dashboard", "rows")


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  memprof diff base.memprof head.memprof
  memprof diff memory.json head.memprof --fail-on 'peak>+2%' --format markdown -o comment.md
  memprof diff base.memprof head.memprof --explain
  memprof diff base.memprof head.memprof --by file
  memprof diff run.memprof --budget 40GiB
  memprof diff run.memprof --fail-on 'phase:backward>24GiB' --warn-on 'step_time>250ms'
  memprof diff gpu.pickle dry-run.pickle
  memprof diff --device a100-80g gpu.pickle -- train.py --batch-size 8""",
)
@click.argument("sides", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[BASE] HEAD")
@option("--fail-on", group="Limits", multiple=True, metavar="GATE", help=_GATE)
@option("--warn-on", group="Limits", multiple=True, metavar="GATE", help="Warn if this is exceeded.")
@option("--budget", group="Limits", metavar="SIZE", help="Without BASE: maximum peak of allocated bytes, 40GiB.")
@device_option(
    "machine",
    "Without BASE: budget of this device, such as rtx3090. Of a snapshot: dry-run the script on this GPU.",
    group="Limits",
)
@option("--base", "bases", group="Sides", multiple=True, metavar="TRACE", help="Another recording of the base.")
@option("--head", "heads", group="Sides", multiple=True, metavar="TRACE", help="Another recording of the head.")
@option(
    "--ignore",
    group="Sides",
    multiple=True,
    metavar="WHAT",
    help="Compare although this differs: model, device, torch, batch, 'allocator settings', ...; 'all' for everything.",
)
@option(
    "--allocations",
    group=_GROUP,
    is_flag=True,
    help="Compare those of a GPU with a dry run's, one by one.  [default: if BASE is a memory snapshot]",
)
@option(
    "--tolerance",
    group=_GROUP,
    default="0%",
    show_default=True,
    metavar="PERCENT",
    help="Largest error of the peak.",
)
@option("--figure", group=_GROUP, metavar="FILE.svg", help="Draw both sides' live bytes.")
@option("--dashboard", "in_dashboard", group=_GROUP, is_flag=True, help="Show both in a browser.")
@option("--by", group="Output", type=click.Choice(_KINDS), help="Show what changed by this only.")
@option("--explain", "explains", group="Output", is_flag=True, help="Explain what changed, and in which modules.")
@option(
    "--format",
    "form",
    group="Output",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="The format.",
)
@json_option
@output_option("Write to this file, replacing it.")
@option(
    "--rows",
    group="Output",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="Rows of a table.",
)
@click.pass_context
def diff(ctx: click.Context, /, sides: tuple[str, ...], is_json: bool, form: str, **flags: Any) -> int:
    """Compare the memory of two recordings: the peak, every phase, and their composition.

    BASE and HEAD are recordings, or the JSON of memprof export --to summary. With several recordings per side, medians
    are compared. The exit code is 4 if a --fail-on gate fails, and 3 if the two are not comparable (another device,
    torch, batch ...).

    Without BASE, HEAD is compared with --budget, --device and gates that need no base. If none is given, a recording
    under a plan is compared with the plan's budget. The exit code is 4 if it exceeds one.

    If BASE is the memory snapshot that a job wrote on a GPU with torch.cuda.memory._dump_snapshot(), its allocations
    are compared one by one with those of HEAD, a snapshot or a recording. With --device, the job's own script is
    dry-run on that device instead, until it writes its snapshot there; the file of the real GPU is not touched. Sizes
    are rounded up to 512 bytes. The exit code is 4 if the peaks differ by more than --tolerance. With --format
    markdown, one row of the table in docs/how-true.md is printed, to contribute it.
    """
    form = "json" if is_json else form
    base, rest = sides[0], sides[2:] if sides[1:2] == ("--",) else sides[1:]
    if flags.pop("allocations") or _is_snapshot(base):
        refuse_others(ctx, (*_ALLOCATIONS, *_ALL), lambda _: "does not apply to the allocations of a GPU: leave it out")
        if form not in ("text", "json", "markdown"):
            raise UsageError(f"--format {form} is for two recordings: for allocations, give text, json or markdown.")
        from memprof.cli.pages.diff.allocations_diff import compare_allocations

        return compare_allocations(base, rest, form=form, **{name: flags[name] for name in _ALLOCATIONS[1:]})
    if not rest:
        refuse_others(ctx, (*_ONE, *_ALL), lambda one: _needs(one, f"a base: name it before {base}"))
        if form not in ("text", "json"):
            raise UsageError(f"--format {form} is for two recordings: name a base before {base}, or leave it out.")
        from memprof.cli.pages.diff.check_page import check

        return check(base, **{name: flags[name] for name in _ONE}, is_json=form == "json")
    refuse_others(ctx, (*_TWO, *_ALL), lambda one: _needs(one, "a single recording, or write --fail-on 'peak>40GiB'"))
    if len(rest) > 1:
        raise UsageError(f"{len(sides)} recordings: name one of each side, and others as --base TRACE or --head TRACE.")
    return _compare(base, rest[0], form=form, **{name: flags[name] for name in _TWO})


def _needs(one: click.Option, other: str) -> str:
    return f"needs {'allocations: add --allocations' if getattr(one, 'group', '') == _GROUP else other}"


def _is_snapshot(path: str) -> bool:
    """Returns whether a file is a pickle, as torch's memory snapshots are."""
    place = Path(path)
    if not place.is_file():  # a pipe must not be read twice
        return False
    try:
        with place.open("rb") as file:
            return file.read(1) == b"\x80"
    except OSError:  # what opens recordings says why
        return False


def _compare(
    base: str,
    head: str,
    *,
    bases: tuple[str, ...],
    heads: tuple[str, ...],
    fail_on: tuple[str, ...],
    warn_on: tuple[str, ...],
    ignore: tuple[str, ...],
    explains: bool,
    form: str,
    output: Path | None,
    rows: int,
    by: str | None,
) -> int:
    """Writes the diff of two sides and returns the exit code."""
    fail, warn = chosen_gates(fail_on, warn_on)
    from memprof.analysis.diff.comparison import FRAME, compare, open_side
    from memprof.errors import GateFailedError, InconclusiveError

    unknown = set(ignore) - {*FRAME, "all"}
    if unknown:
        raise UsageError(f"unknown --ignore {min(unknown)!r}; known are {', '.join(FRAME)}, all.")
    found = compare(
        [open_side(path) for path in (base, *bases)],
        [open_side(path) for path in (head, *heads)],
        fail=fail,
        warn=warn,
        any_model=not {"model", "all"}.isdisjoint(ignore),
    )
    found = replace(found, by=by or "")
    apart = [one for one in found.differences if one.what not in ignore and "all" not in ignore]
    if apart and not explains:
        parts = "; ".join(f"{one.what} is {one.base} in the base and {one.head} now" for one in apart)
        flags = " ".join(f"--ignore {one.what!r}" if " " in one.what else f"--ignore {one.what}" for one in apart)
        raise InconclusiveError(f"the recordings are not comparable: {parts}. To compare them anyway: {flags}")
    write_text(render(found, form, rows, explains=explains, names=(base, head)), output)
    if output is not None:
        notify(f"written to {output}")
    is_undecided = any(level == "fail" and verdict.is_undecided for level, verdict in found.verdicts)
    return GateFailedError.exit_code if found.is_failed else InconclusiveError.exit_code if is_undecided else 0
